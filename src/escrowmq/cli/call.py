"""Ask name servers and brokers, and wait: what commands need of the network, and no more."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Final, NamedTuple

from escrowmq.cli.access import current_access
from escrowmq.client.access import Access
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import (
    BrokenBody,
    EscrowError,
    NotSent,
    OutcomeUnknown,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
    UnknownRequest,
)
from escrowmq.parsing import parse_address, parse_servers
from escrowmq.remoting.bodies import ClusterInfo, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Call, Connection, Response
from escrowmq.remoting.headers import Header

DEFAULT_TIMEOUT_S: Final = 10.0
MAX_CALLS_IN_FLIGHT: Final = 64  # calls on their way at once, so that one flush answers many
_ADDRESS_HINT: Final = "(name server: -n HOST:PORT, or one broker: --broker HOST:PORT)"
_CHUNK_BYTES: Final = 256 << 10
MASTER_ID: Final = 0


class SyncReply(NamedTuple):
    ext_fields: dict[str, str]
    body: bytes


class BrokerAddress(NamedTuple):
    name: str
    address: str


class SyncConnection:
    """One connection. Errors are ours, and say who could not be asked."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        """`access`: that of the command that runs, if none is given."""
        self.address = address
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        shown = access or current_access()
        self._connection = Connection(sign=shown.signer())
        self._responses: dict[int, tuple[Command, bytes]] = {}
        try:
            self._socket = _open_socket(address, timeout_s, shown.ssl_context())
        except OSError as error:
            raise NotSent(f"{address} cannot be reached: {_os_error_text(error)}") from error

    def __enter__(self) -> SyncConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._socket.close()

    def call(self, code: int, header: Header | None = None, body: bytes = b"") -> SyncReply:
        """Raises RequestRefused if the answer is no, TransportError if there is none."""
        return self._wait(self._send(code, header, body))

    def call_all_raw(self, code: int, requests: Iterable[Header]) -> list[tuple[Command, bytes]]:
        """In the order of the requests, whatever the answers say."""
        calls = [self._send(code, fields) for fields in requests]
        return [self._wait_raw(call) for call in calls]

    def call_many(
        self, code: int, requests: Iterable[Header]
    ) -> Iterator[SyncReply | RequestRefused]:
        """The answers in the order of the requests, several of which are on their way at once."""
        calls: deque[Call] = deque()
        for fields in requests:
            calls.append(self._send(code, fields))
            if len(calls) >= MAX_CALLS_IN_FLIGHT:
                yield self._wait_or_refusal(calls.popleft())
        while calls:
            yield self._wait_or_refusal(calls.popleft())

    def _wait_or_refusal(self, call: Call) -> SyncReply | RequestRefused:
        try:
            return self._wait(call)
        except RequestRefused as error:
            return error

    def _send(self, code: int, header: Header | None, body: bytes = b"") -> Call:
        deadline_s = self._clock.elapsed_s() + self._timeout_s
        call, data = self._connection.call(code, header, body, deadline_s=deadline_s)
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {_os_error_text(error)}") from error
        return call

    def _wait_raw(self, call: Call) -> tuple[Command, bytes]:
        while call.opaque not in self._responses:
            self._receive(call)
        return self._responses.pop(call.opaque)

    def _wait(self, call: Call) -> SyncReply:
        command, body = self._wait_raw(call)
        if command.code == ResponseCode.SUCCESS:
            return SyncReply(command.ext_fields, body)
        if command.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise UnknownRequest(
                command.code,
                f"{self.address} does not know {request_name(call.code)}: it is no EscrowMQ "
                "broker, or an older one; Apache RocketMQ has nothing like it",
            )
        raise RequestRefused(command.code, command.remark or f"code {command.code}")

    def _receive(self, call: Call) -> None:
        left_s = call.deadline_s - self._clock.elapsed_s()
        if left_s <= 0:
            raise OutcomeUnknown(
                f"{self.address} has not answered {request_name(call.code)} in {self._timeout_s} s"
            )
        try:
            self._socket.settimeout(left_s)
            data = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            return
        except OSError as error:
            raise OutcomeUnknown(f"{self.address}: {_os_error_text(error)}") from error
        if not data:
            raise OutcomeUnknown(f"{self.address} closed the connection before it answered")
        try:
            self._connection.receive(data)
            for event in self._connection.events():
                if isinstance(event, Response):
                    self._responses[event.call.opaque] = event.command, bytes(event.body)
        except RemoteProtocolError as error:
            raise OutcomeUnknown(
                f"{self.address} does not speak the remoting protocol: {error}"
            ) from error


def parse_name_servers(namesrv: str) -> list[str]:
    """Return the addresses given as `--namesrv`. Raises NotSent."""
    try:
        return parse_servers(namesrv)
    except ValueError as error:
        raise NotSent(f"{error} {_ADDRESS_HINT}") from None


def master_brokers(cluster_info: ClusterInfo) -> list[BrokerAddress]:
    return [
        BrokerAddress(name, route.broker_addrs[MASTER_ID])
        for name, route in sorted(cluster_info.broker_addr_table.items())
        if MASTER_ID in route.broker_addrs
    ]


def find_cluster(namesrv: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> ClusterInfo:
    """As the first name server knows it that knows any broker."""
    failed: list[str] = []
    for address in parse_name_servers(namesrv):
        try:
            with SyncConnection(address, timeout_s=timeout_s) as caller:
                body = caller.call(RequestCode.GET_BROKER_CLUSTER_INFO).body
            known = decode_body(ClusterInfo, body)
        except (TransportError, RequestRefused, BrokenBody) as error:
            failed.append(error_text(error))
            continue
        if master_brokers(known):
            return known
        failed.append(f"{address} knows no broker")
    raise NotSent(f"{'; '.join(failed)} {_ADDRESS_HINT}")


def find_brokers(namesrv: str) -> list[BrokerAddress]:
    """The masters that a name server knows."""
    return master_brokers(find_cluster(namesrv))


def error_text(error: EscrowError) -> str:
    """In one line, for people."""
    return error.remark if isinstance(error, RequestRefused) else str(error)


def _open_socket(address: str, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise NotSent(str(error)) from None
    made = socket.create_connection((host, port), timeout=timeout_s)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return made
    try:
        return tls.wrap_socket(made, server_hostname=host)
    except OSError:
        made.close()
        raise


def _os_error_text(error: OSError) -> str:
    return error.strerror or str(error)
