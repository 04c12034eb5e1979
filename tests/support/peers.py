"""A name server and brokers on loopback that answer as a test says, for what no healthy broker
does: a status other than SEND_OK, an answer that is lost, one that takes long.

    async with Peers("a", "b") as peers:
        peers["a"].answers[RequestCode.SEND_MESSAGE_V2] = lambda request: None   # never
        async with Producer(peers.address, group="g") as producer: ...

They speak through `escrowmq.wire`, over real sockets. Unless told otherwise a peer stores what is
sent to it, takes every end, and does not know EscrowMQ's own requests: it is RocketMQ's kind.
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

OURS = range(3701, 3720)
SENDS = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)

# The bytes to send back; None: no answer.
Answering = Callable[[Request[Any]], bytes | None]


class Peer:
    """One broker."""

    def __init__(self, name: str, queues: int = 4) -> None:
        self.name = name
        self.queues = queues
        self.requests: list[Request[Any]] = []
        self.answers: dict[int, Answering] = {}
        self.lines: list[asyncio.Transport] = []
        self.is_listed = True
        self.address = ""
        self._offset = 0
        self._sent = SendResponseEncoder(store_host=encode_host("127.0.0.1", 1))

    def asked(self, *codes: int) -> list[Request[Any]]:
        return [request for request in self.requests if request.head.code in codes]

    def sent(self, request: Request[Any], code: int = 0) -> bytes:
        """As if it were stored; `code` says how safely."""
        self._offset += 100
        queue_id = request.head.fields.queue_id
        return self._sent.encode(request, self._offset, queue_id, self._offset // 100, code)

    def handle(self, request: Request[Any]) -> bytes | None:
        self.requests.append(request)
        code = request.head.code
        if code in self.answers:
            return self.answers[code](request)
        if code in SENDS:
            return self.sent(request)
        if code in OURS:
            return encode_response(request, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        return encode_success(request)


class _Line(asyncio.Protocol):
    def __init__(self, handle: Answering, lines: list[asyncio.Transport]) -> None:
        self._handle = handle
        self._lines = lines
        self._connection = Connection()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._lines.append(transport)

    def data_received(self, data: bytes) -> None:
        self._connection.receive(data)
        for event in self._connection.events():
            if isinstance(event, Request):
                kept = Request(event.head, bytes(event.body), event.serializer)
                self._transport.write(self._handle(kept) or b"")


class Peers:
    def __init__(self, *names: str, queues: int = 4) -> None:
        self._peers = {name: Peer(name, queues) for name in names}
        self._servers: list[asyncio.Server] = []
        self.address = ""  # of the name server
        self.asked_for_routes = 0
        self.is_silent = False

    def __getitem__(self, name: str) -> Peer:
        return self._peers[name]

    async def __aenter__(self) -> Peers:
        for peer in self._peers.values():
            peer.address = await self._listen(peer.handle, peer.lines)
        self.address = await self._listen(self._route, [])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for peer in self._peers.values():
            for line in peer.lines:
                line.close()
        for server in self._servers:
            server.close()

    async def _listen(self, handle: Answering, lines: list[asyncio.Transport]) -> str:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Line(handle, lines), "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def _route(self, request: Request[Any]) -> bytes | None:
        if self.is_silent:
            return None
        if request.head.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return encode_response(
                request, body=encode_body(ClusterInfo(broker_addr_table=self._brokers()))
            )
        self.asked_for_routes += 1
        listed = [peer for peer in self._peers.values() if peer.is_listed]
        queues = [
            QueueRoute(
                broker_name=peer.name,
                read_queue_nums=peer.queues,
                write_queue_nums=peer.queues,
                perm=6,
            )
            for peer in listed
        ]
        brokers = list(self._brokers().values())
        return encode_response(
            request, body=encode_body(TopicRoute(queue_datas=queues, broker_datas=brokers))
        )

    def _brokers(self) -> dict[str, BrokerRoute]:
        return {
            name: BrokerRoute(cluster="c", broker_name=name, broker_addrs={0: peer.address})
            for name, peer in self._peers.items()
            if peer.is_listed
        }


def refusing(code: int, remark: str = "no") -> Answering:
    return lambda request: encode_response(request, code=code, remark=remark)


def silent(request: Request[Any]) -> None:
    """It is never answered."""
