"""A name server and brokers on loopback that misbehave as a test needs it: a status other than
SEND_OK, a lost response, a late response.

    async with FakeCluster("a", "b") as cluster:
        cluster["a"].responders[RequestCode.SEND_MESSAGE_V2] = no_response
        async with Producer(cluster.address, group="g") as producer: ...

They use `escrowmq.remoting` over real sockets. By default a broker acknowledges every send and
every end, and refuses EscrowMQ's own request codes, like a RocketMQ broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from escrowmq.message.keys import encode_host
from escrowmq.remoting.bodies import BrokerRoute, ClusterInfo, QueueRoute, TopicRoute, encode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Connection
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendResponseEncoder, encode_response, encode_success

ESCROWMQ_CODES = range(3701, 3720)
SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)

# Returns the bytes to send back; None for no response.
Responder = Callable[[Request[Any]], bytes | None]


class FakeBroker:
    """One broker. `responders` replaces its default behaviour for a request code."""

    def __init__(self, name: str, queues: int = 4) -> None:
        self.name = name
        self.queues = queues  # of every topic
        self.requests: list[Request[Any]] = []
        self.responders: dict[int, Responder] = {}
        self.transports: list[asyncio.Transport] = []
        self.is_listed = True
        self.address = ""
        self._log_offset = 0
        self._send_responses = SendResponseEncoder(store_host=encode_host("127.0.0.1", 1))

    def received(self, *codes: int) -> list[Request[Any]]:
        """Return the received requests with these codes."""
        return [request for request in self.requests if request.head.code in codes]

    def store_response(self, request: Request[Any], code: int = 0) -> bytes:
        """Return the response to a send. `code` is SUCCESS or says why it is less durable."""
        self._log_offset += 100
        queue_id = request.head.fields.queue_id
        queue_offset = self._log_offset // 100
        return self._send_responses.encode(request, self._log_offset, queue_id, queue_offset, code)

    def handle(self, request: Request[Any]) -> bytes | None:
        self.requests.append(request)
        code = request.head.code
        if code in self.responders:
            return self.responders[code](request)
        if code in SENDS:
            return self.store_response(request)
        if code in ESCROWMQ_CODES:
            return encode_response(request, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        return encode_success(request)


class _ServerProtocol(asyncio.Protocol):
    def __init__(self, handle: Responder, transports: list[asyncio.Transport]) -> None:
        self._handle = handle
        self._transports = transports
        self._connection = Connection()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._transports.append(transport)

    def data_received(self, data: bytes) -> None:
        self._connection.receive(data)
        for event in self._connection.events():
            if isinstance(event, Request):
                copy = Request(event.head, bytes(event.body), event.serializer)
                self._transport.write(self._handle(copy) or b"")


class FakeCluster:
    """A name server and one broker for each name."""

    def __init__(self, *names: str, queues: int = 4) -> None:
        self._brokers = {name: FakeBroker(name, queues) for name in names}
        self._servers: list[asyncio.Server] = []
        self.address = ""  # of the name server
        self.route_request_count = 0
        self.is_silent = False  # the name server does not respond
        self.route_responder: Responder | None = None  # replaces the answers of the name server

    def __getitem__(self, name: str) -> FakeBroker:
        return self._brokers[name]

    async def __aenter__(self) -> FakeCluster:
        for broker in self._brokers.values():
            broker.address = await self._listen(broker.handle, broker.transports)
        self.address = await self._listen(self._handle_name_server, [])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for broker in self._brokers.values():
            for transport in broker.transports:
                transport.close()
        for server in self._servers:
            server.close()

    async def _listen(self, handle: Responder, transports: list[asyncio.Transport]) -> str:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: _ServerProtocol(handle, transports), "127.0.0.1", 0
        )
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _handle_name_server(self, request: Request[Any]) -> bytes | None:
        if self.is_silent:
            return None
        if self.route_responder is not None:
            return self.route_responder(request)
        if request.head.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return encode_response(
                request, body=encode_body(ClusterInfo(broker_addr_table=self._broker_routes()))
            )
        self.route_request_count += 1
        queues = [
            QueueRoute(
                broker_name=broker.name,
                read_queue_nums=broker.queues,
                write_queue_nums=broker.queues,
                perm=6,
            )
            for broker in self._brokers.values()
            if broker.is_listed
        ]
        brokers = list(self._broker_routes().values())
        return encode_response(
            request, body=encode_body(TopicRoute(queue_datas=queues, broker_datas=brokers))
        )

    def _broker_routes(self) -> dict[str, BrokerRoute]:
        return {
            name: BrokerRoute(cluster="c", broker_name=name, broker_addrs={0: broker.address})
            for name, broker in self._brokers.items()
            if broker.is_listed
        }


def refuse_with(code: int, remark: str = "no") -> Responder:
    """Return a responder that refuses every request."""
    return lambda request: encode_response(request, code=code, remark=remark)


def no_response(request: Request[Any]) -> None:
    """Do not respond to the request."""
