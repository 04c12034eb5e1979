"""Metrics and health over HTTP, as far as scrapers and probes need it: GET and HEAD, one answer per
connection.

Bounded in everything: connections, the length of a request, the time it may take to come, the time
its answer may take to leave. A page is made in slices between which the broker works, and nobody
waits for a scraper but its own connection.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from escrowmq.clock import Clock
from escrowmq.config import Config, TlsMode
from escrowmq.errors import EscrowError
from escrowmq.metrics import CONTENT_TYPE
from escrowmq.server.remoting_server import bind
from escrowmq.server.security import AccessControl

log = logging.getLogger(__name__)

_PLAIN_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

_EXTRA_HEADERS: Final = {
    401: 'WWW-Authenticate: Basic realm="escrowmq"\r\n',
    405: "Allow: GET, HEAD\r\n",
}
MetricsPermission = Callable[[str, str, str], bool]  # access key, secret key, address


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    connections_max: int = 8
    request_bytes_max: int = 8192
    request_timeout_s: float = 5.0
    response_timeout_s: float = 10.0
    render_slice_s: float = 0.001


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    content_type: str = _PLAIN_TEXT

    def encode(self, *, is_head: bool) -> bytes:
        allow = _EXTRA_HEADERS.get(self.status, "")
        lead = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n"
            f"Content-Type: {self.content_type}\r\nContent-Length: {len(self.body)}\r\n"
            f"{allow}Connection: close\r\n\r\n"
        )
        return lead.encode() + (b"" if is_head else self.body)


class Health:
    """Whether clients should come: what is missing still or again, or None."""

    def __init__(self) -> None:
        self.reason: str | None = "starting"
        self._checks: list[Callable[[], str | None]] = []

    def add(self, check: Callable[[], str | None]) -> None:
        self._checks.append(check)

    def not_ready_reason(self) -> str | None:
        if self.reason is not None:
            return self.reason
        return next((missing for check in self._checks if (missing := check())), None)


class MetricsPage(Protocol):
    """What /metrics shows: a registry, or the pages of many."""

    def lines(self) -> Iterable[str]: ...


class MetricsServer:
    """`why_not_ready` says what is missing; None when nothing is. `may_see`: /metrics, that is;
    whether the server lives and is ready everybody may know."""

    def __init__(
        self,
        page: MetricsPage,
        clock: Clock,
        not_ready_reason: Callable[[], str | None],
        limits: HttpLimits = HttpLimits(),  # noqa: B008
        can_see_metrics: MetricsPermission = lambda key, secret, host: True,
        *,
        before_render: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._can_see_metrics = can_see_metrics
        self._page_source = page
        self._clock = clock
        self._not_ready_reason = not_ready_reason
        self._limits = limits
        self._before_render = before_render
        self._tasks: set[asyncio.Task[None]] = set()
        self._render_lock = asyncio.Lock()  # one page at a time is work enough beside the broker
        self._server: asyncio.Server | None = None

    async def listen(
        self, listening_socket: socket.socket, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._server = await asyncio.start_server(
            self._accept,
            sock=listening_socket,
            limit=self._limits.request_bytes_max,
            ssl=ssl_context,
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._limits.connections_max:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transport = writer.transport
        transport.set_write_buffer_limits(high=0)  # so that drain waits for the last byte
        try:
            address = transport.get_extra_info("peername") or ("", 0)
            answered = await self._read_and_respond(reader, address[0])
            if answered is not None:
                writer.write(answered)
                async with asyncio.timeout(self._limits.response_timeout_s):
                    await writer.drain()
                transport.close()
        except (OSError, TimeoutError):
            pass  # the scraper's loss
        except Exception:  # a bug of ours, or of a collector: the broker goes on
            log.exception("a page of metrics failed")
            writer.write(_Response(500, b"failed, see the log\n").encode(is_head=False))
            transport.close()
        finally:
            if not transport.is_closing():
                transport.abort()

    async def _read_and_respond(self, reader: asyncio.StreamReader, host: str) -> bytes | None:
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None  # gone before it had asked
        except asyncio.LimitOverrunError:
            return _Response(431, b"too long\n").encode(is_head=False)
        except TimeoutError:
            return _Response(408, b"too slow\n").encode(is_head=False)
        method, path = _parse_request_line(request)
        if path == "/metrics" and not self._can_see_metrics(*_credentials(request), host):
            answer = _Response(401, b"an account that may see the cluster is wanted\n")
        else:
            answer = await self._respond(method, path)
        return answer.encode(is_head=method == "HEAD")

    async def _respond(self, method: str, path: str) -> _Response:
        if not method:
            return _Response(400, b"not HTTP\n")
        if method not in ("GET", "HEAD"):
            return _Response(405, b"only GET and HEAD\n")
        match path:
            case "/metrics":
                try:
                    return _Response(200, await self._render_page(), CONTENT_TYPE)
                except EscrowError as error:  # the store is closed, or has failed
                    return _not_ready(str(error))
            case "/health/live":
                return _Response(200, b"ok\n")
            case "/health/ready":
                missing = self._not_ready_reason()
                return _Response(200, b"ok\n") if missing is None else _not_ready(missing)
        return _Response(404, b"try /metrics, /health/live, /health/ready\n")

    async def _render_page(self) -> bytes:
        async with self._render_lock:
            if self._before_render is not None:
                await self._before_render()
            page = bytearray()
            began_s = self._clock.elapsed_s()
            for line in self._page_source.lines():
                page += line.encode()
                if self._clock.elapsed_s() - began_s > self._limits.render_slice_s:
                    await asyncio.sleep(0)
                    began_s = self._clock.elapsed_s()
            return bytes(page)


@contextlib.asynccontextmanager
async def serve_http(
    config: Config,
    clock: Clock,
    page: MetricsPage,
    health: Health,
    access: AccessControl,
    inherited_fd: int | None = None,
    *,
    before_render: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """On the port of the configuration, or on a socket that somebody else has opened for us.

    `before` is awaited before a page is made.
    """
    host = config.metrics.metrics_address or config.network.bind_address
    may_see = access.can_see_metrics
    server = MetricsServer(
        page, clock, health.not_ready_reason, can_see_metrics=may_see, before_render=before_render
    )
    if inherited_fd is not None:
        await server.listen(socket.socket(fileno=inherited_fd))
    else:
        enforcing = config.security.tls_mode is TlsMode.ENFORCING
        tls = access.tls.ssl_context if access.tls is not None and enforcing else None
        await server.listen(bind(host, config.metrics.metrics_port), tls)
        scheme = "http" if tls is None else "https"
        log.info("metrics at %s://%s:%d/metrics", scheme, host, config.metrics.metrics_port)
    try:
        yield
    finally:
        await server.close()


def _not_ready(reason: str) -> _Response:
    return _Response(503, f"{reason}\n".encode())


def _credentials(request: bytes) -> tuple[str, str]:
    """Of HTTP's Basic scheme; empty ones if there are none."""
    for line in request.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        scheme, _, told = value.strip().partition(b" ")
        if name.strip().lower() == b"authorization" and scheme.lower() == b"basic":
            try:
                key, _, secret = (
                    base64.b64decode(told.strip(), validate=True).decode().partition(":")
                )
            except ValueError:  # neither Base64 nor UTF-8
                break
            return key, secret
    return "", ""


def _parse_request_line(request: bytes) -> tuple[str, str]:
    """Method and path of a request; empty ones if it is none."""
    words = request.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.0", b"HTTP/1.1") or not request.isascii():
        return "", ""
    method, target = words[0].decode(), words[1].decode()
    if not method.isalpha() or not target.startswith("/"):
        return "", ""
    return method, target.partition("?")[0]
