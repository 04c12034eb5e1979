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
from escrowmq.server.security import Access

log = logging.getLogger(__name__)

_PLAIN: Final = "text/plain; charset=utf-8"
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

_MORE: Final = {
    401: 'WWW-Authenticate: Basic realm="escrowmq"\r\n',
    405: "Allow: GET, HEAD\r\n",
}
MaySee = Callable[[str, str, str], bool]  # access key, secret key, address


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    connections_max: int = 8
    request_bytes_max: int = 8192
    request_s: float = 5.0
    answer_s: float = 10.0
    slice_s: float = 0.001


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    kind: str = _PLAIN

    def encode(self, *, is_head: bool) -> bytes:
        allow = _MORE.get(self.status, "")
        lead = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\n"
            f"Content-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
            f"{allow}Connection: close\r\n\r\n"
        )
        return lead.encode() + (b"" if is_head else self.body)


class Health:
    """Whether clients should come: what is missing still or again, or None."""

    def __init__(self) -> None:
        self.missing: str | None = "starting"
        self._checks: list[Callable[[], str | None]] = []

    def add(self, check: Callable[[], str | None]) -> None:
        self._checks.append(check)

    def why_not_ready(self) -> str | None:
        if self.missing is not None:
            return self.missing
        return next((missing for check in self._checks if (missing := check())), None)


class Page(Protocol):
    """What /metrics shows: a registry, or the pages of many."""

    def lines(self) -> Iterable[str]: ...


class MetricsServer:
    """`why_not_ready` says what is missing; None when nothing is. `may_see`: /metrics, that is;
    whether the server lives and is ready everybody may know."""

    def __init__(
        self,
        page: Page,
        clock: Clock,
        why_not_ready: Callable[[], str | None],
        limits: HttpLimits = HttpLimits(),  # noqa: B008
        may_see: MaySee = lambda key, secret, host: True,
        *,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._may_see = may_see
        self._shown = page
        self._clock = clock
        self._why_not_ready = why_not_ready
        self._limits = limits
        self._before = before
        self._tasks: set[asyncio.Task[None]] = set()
        self._rendering = asyncio.Lock()  # one page at a time is work enough beside the broker
        self._server: asyncio.Server | None = None

    async def listen(self, bound: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(
            self._begin, sock=bound, limit=self._limits.request_bytes_max, ssl=tls
        )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
            answered = await self._answer_to(reader, address[0])
            if answered is not None:
                writer.write(answered)
                async with asyncio.timeout(self._limits.answer_s):
                    await writer.drain()
                transport.close()
        except (OSError, TimeoutError):
            pass  # the scraper's loss
        except Exception:  # a bug of ours, or of a collector: the broker goes on
            log.exception("a page of metrics failed")
            writer.write(_Answer(500, b"failed, see the log\n").encode(is_head=False))
            transport.close()
        finally:
            if not transport.is_closing():
                transport.abort()

    async def _answer_to(self, reader: asyncio.StreamReader, host: str) -> bytes | None:
        try:
            async with asyncio.timeout(self._limits.request_s):
                request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None  # gone before it had asked
        except asyncio.LimitOverrunError:
            return _Answer(431, b"too long\n").encode(is_head=False)
        except TimeoutError:
            return _Answer(408, b"too slow\n").encode(is_head=False)
        method, path = _parse(request)
        if path == "/metrics" and not self._may_see(*_credentials(request), host):
            answer = _Answer(401, b"an account that may see the cluster is wanted\n")
        else:
            answer = await self._answer(method, path)
        return answer.encode(is_head=method == "HEAD")

    async def _answer(self, method: str, path: str) -> _Answer:
        if not method:
            return _Answer(400, b"not HTTP\n")
        if method not in ("GET", "HEAD"):
            return _Answer(405, b"only GET and HEAD\n")
        match path:
            case "/metrics":
                try:
                    return _Answer(200, await self._page(), CONTENT_TYPE)
                except EscrowError as error:  # the store is closed, or has failed
                    return _not_ready(str(error))
            case "/health/live":
                return _Answer(200, b"ok\n")
            case "/health/ready":
                missing = self._why_not_ready()
                return _Answer(200, b"ok\n") if missing is None else _not_ready(missing)
        return _Answer(404, b"try /metrics, /health/live, /health/ready\n")

    async def _page(self) -> bytes:
        async with self._rendering:
            if self._before is not None:
                await self._before()
            page = bytearray()
            began_s = self._clock.elapsed_s()
            for line in self._shown.lines():
                page += line.encode()
                if self._clock.elapsed_s() - began_s > self._limits.slice_s:
                    await asyncio.sleep(0)
                    began_s = self._clock.elapsed_s()
            return bytes(page)


@contextlib.asynccontextmanager
async def serving(
    config: Config,
    clock: Clock,
    page: Page,
    health: Health,
    access: Access,
    inherited: int | None = None,
    *,
    before: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:
    """On the port of the configuration, or on a socket that somebody else has opened for us.

    `before` is awaited before a page is made.
    """
    host = config.metrics.metrics_address or config.network.bind_address
    may_see = access.may_see_metrics
    server = MetricsServer(page, clock, health.why_not_ready, may_see=may_see, before=before)
    if inherited is not None:
        await server.listen(socket.socket(fileno=inherited))
    else:
        enforcing = config.security.tls_mode is TlsMode.ENFORCING
        tls = access.tls.context if access.tls is not None and enforcing else None
        await server.listen(bind(host, config.metrics.metrics_port), tls)
        scheme = "http" if tls is None else "https"
        log.info("metrics at %s://%s:%d/metrics", scheme, host, config.metrics.metrics_port)
    try:
        yield
    finally:
        await server.close()


def _not_ready(missing: str) -> _Answer:
    return _Answer(503, f"{missing}\n".encode())


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


def _parse(request: bytes) -> tuple[str, str]:
    """Method and path of a request; empty ones if it is none."""
    words = request.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.0", b"HTTP/1.1") or not request.isascii():
        return "", ""
    method, target = words[0].decode(), words[1].decode()
    if not method.isalpha() or not target.startswith("/"):
        return "", ""
    return method, target.partition("?")[0]
