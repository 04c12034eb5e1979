"""Metrics and health over HTTP, for Prometheus and for probes.

    GET /metrics        the page of metrics; with an ACL, for accounts that may see the cluster
    GET /health/live    200 as long as the process responds
    GET /health/ready   200 if clients should connect, otherwise 503 and the reason

aiohttp implements HTTP. The code here keeps scrapers from slowing the broker down: connections,
requests and times are limited, a connection gets one response, and a page is rendered in slices of
a millisecond, between which the broker works.

A probe must get through whatever others do here, or an orchestrator kills a healthy broker. Health
is answered at once; only pages of metrics take time, and there are fewer of them at once than
connections. All other connections wait for their request, and when there are too many, the one that
has waited longest is closed for a new one.

Import this module only if an HTTP port is configured, because aiohttp costs start-up time and
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol, cast

from aiohttp import BasicAuth, web

from escrowmq.clock import Clock
from escrowmq.config import Config
from escrowmq.errors import EscrowError
from escrowmq.metrics import CONTENT_TYPE
from escrowmq.server.metrics import Health
from escrowmq.server.remoting_server import bind
from escrowmq.server.security import AccessControl, TlsDetector

log = logging.getLogger(__name__)
# aiohttp logs a traceback for some malformed requests. A port scan must not fill the log, and
# failures of our handlers are logged here.
_protocol_log = logging.getLogger(f"{__name__}.protocol")
_protocol_log.setLevel(logging.CRITICAL)

_LOGIN_REQUIRED: Final = {"WWW-Authenticate": 'Basic realm="escrowmq"'}
MetricsPermission = Callable[[str, str, str], bool]  # access key, secret key, address


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    connections_max: int = 64
    pages_max: int = 8  # of metrics, at once; the other connections are for health
    line_bytes_max: int = 8192  # of the request line, and of each header
    headers_max: int = 64
    request_bytes_max: int = 32 << 10  # of a whole request; bodies are not read
    request_timeout_s: float = 5.0  # from the connection to the end of the headers
    response_timeout_s: float = 10.0  # from then on, until the client has read the whole response
    render_slice_s: float = 0.001  # then other tasks run


class MetricsPage(Protocol):
    """Source of the page: a registry, or the merged pages of several brokers."""

    def lines(self) -> Iterable[str]: ...


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
    """Serve on the configured port, or on a listening socket inherited from the supervisor.

    `before_render` is awaited before each page. The HTTP port has TLS if TLS is required on the
    other ports: unlike them it cannot detect whether a client uses TLS.
    """
    server = MetricsServer(
        page,
        clock,
        health.not_ready_reason,
        can_see_metrics=access.can_see_metrics,
        before_render=before_render,
    )
    if inherited_fd is not None:
        await server.listen(socket.socket(fileno=inherited_fd))
    else:
        host = config.metrics.metrics_address or config.network.bind_address
        port = config.metrics.metrics_port
        tls = access.tls if config.security.requires_tls else None
        await server.listen(bind(host, port), None if tls is None else tls.ssl_context)
        scheme = "http" if tls is None else "https"
        log.info("metrics at %s://%s:%d/metrics", scheme, host, port)
    try:
        yield
    finally:
        await server.close()


class MetricsServer:
    """The HTTP server. `can_see_metrics` guards /metrics; health is open to everyone."""

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
        self._page = page
        self._clock = clock
        self._not_ready_reason = not_ready_reason
        self._limits = limits
        self._can_see_metrics = can_see_metrics
        self._before_render = before_render
        self._render_lock = asyncio.Lock()  # several pages at once would slow the broker down
        # Of the connections whose request is not complete, the oldest first.
        self._request_timers: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        application = web.Application(middlewares=[self._send_response])
        application.router.add_get("/metrics", self._metrics)
        application.router.add_get("/health/live", self._live)
        application.router.add_get("/health/ready", self._ready)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=_protocol_log,
            handle_signals=False,
            lingering_time=0,  # do not read the body of a request
            max_line_size=limits.line_bytes_max,
            max_field_size=limits.line_bytes_max,
            max_headers=limits.headers_max,
            shutdown_timeout=0,
        )
        self._pages = 0  # that are rendered or sent now
        self._listener: asyncio.Server | TlsDetector | None = None

    async def listen(
        self, listening_socket: socket.socket, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        await self._runner.setup()
        # Not a SockSite: its connections cannot be limited.
        if ssl_context is None:
            self._listener = await asyncio.get_running_loop().create_server(
                self._new_connection, sock=listening_socket
            )
            return
        # It limits the handshakes, which are not connections of aiohttp yet.
        self._listener = TlsDetector(
            self._new_connection,
            lambda: ssl_context,
            is_enforcing=True,
            idle_max_s=self._limits.request_timeout_s,
            has_capacity=lambda host, pending: True,
            pending_max=self._limits.connections_max,
        )
        self._listener.listen(listening_socket)

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for timer in self._request_timers.values():
            timer.cancel()
        await self._runner.cleanup()

    # --- connections -----------------------------------------------------------------------------

    def _new_connection(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None  # set by setup()
        if len(server.connections) >= self._limits.connections_max and not self._drop_oldest():
            return _RefusedConnection()
        connection = server()
        self._request_timers[connection] = asyncio.get_running_loop().call_later(
            self._limits.request_timeout_s, self._drop_incomplete, connection
        )
        return _LimitedConnection(
            connection,
            self._limits.request_bytes_max,
            too_long=lambda: self._drop_incomplete(connection),
            lost=lambda: self._forget_timer(connection),
        )

    def _drop_oldest(self) -> bool:
        """Close the connection that has waited longest for its request; False if none waits."""
        for connection in self._request_timers:
            if connection.transport is not None and not connection.transport.is_closing():
                self._drop_incomplete(connection)
                return True
        return False

    def _drop_incomplete(self, connection: web.RequestHandler) -> None:
        """Close a connection whose request is not complete; aiohttp would wait for ever."""
        if self._forget_timer(connection) and connection.transport is not None:
            connection.transport.abort()

    def _forget_timer(self, connection: web.RequestHandler) -> bool:
        """Stop waiting for a request. Return whether it was incomplete."""
        timer = self._request_timers.pop(connection, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    @web.middleware
    async def _send_response(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Send the response within the time limit, and close the connection after it."""
        self._forget_timer(request.protocol)
        transport = request.transport
        response: web.StreamResponse = web.Response(status=503, text="busy, try again\n")
        response.force_close()
        is_page = request.path == "/metrics"
        if is_page and self._pages >= self._limits.pages_max:
            return response
        self._pages += is_page
        try:
            async with asyncio.timeout(self._limits.response_timeout_s):
                response = await self._respond(request, handler)
                response.force_close()
                if transport is None:
                    return response  # the client has gone
                # So that write_eof() waits for the last byte.
                transport.set_write_buffer_limits(high=0)
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError):
            if transport is not None:
                transport.abort()
        finally:
            self._pages -= is_page
        return response

    async def _respond(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            return web.Response(
                status=405,
                text="only GET and HEAD are allowed\n",
                headers={"Allow": error.headers["Allow"]},
            )
        except web.HTTPNotFound:
            return web.Response(status=404, text="try /metrics, /health/live, /health/ready\n")
        except Exception:  # a bug in a collector must not affect the broker
            log.exception("HTTP request failed path=%s", request.path)
            return web.Response(status=500, text="the request failed, see the log\n")

    # --- pages -----------------------------------------------------------------------------------

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._can_see_metrics(*_credentials(request), request.remote or ""):
            return web.Response(
                status=401,
                text="log in with an account that may see the cluster\n",
                headers=_LOGIN_REQUIRED,
            )
        try:
            page = await self._render()
        except EscrowError as error:  # the store is closed, or has failed
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _ready(self, request: web.Request) -> web.Response:
        reason = self._not_ready_reason()
        if reason is not None:
            return web.Response(status=503, text=f"{reason}\n")
        return web.Response(text="ok\n")

    async def _render(self) -> bytes:
        async with self._render_lock:
            if self._before_render is not None:
                await self._before_render()
            page = bytearray()
            slice_start_s = self._clock.elapsed_s()
            for line in self._page.lines():
                page += line.encode()
                if self._clock.elapsed_s() - slice_start_s > self._limits.render_slice_s:
                    await asyncio.sleep(0)
                    slice_start_s = self._clock.elapsed_s()
            return bytes(page)


class _LimitedConnection(asyncio.Protocol):
    """Hands the bytes of a connection to aiohttp, up to a limit.

    The objects of aiohttp refer to each other, so whatever they were given stays in memory until
    the garbage is collected. The collector counts objects and not bytes: a few hundred requests
    with long headers took gigabytes.
    """

    def __init__(
        self,
        connection: web.RequestHandler,
        bytes_max: int,
        *,
        too_long: Callable[[], object],
        lost: Callable[[], object],
    ) -> None:
        self._connection = connection
        self._remaining_bytes = bytes_max
        self._too_long = too_long
        self._lost = lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._remaining_bytes -= len(data)
        if self._remaining_bytes >= 0:
            self._connection.data_received(data)
        else:
            self._too_long()  # behind a complete request, it is ignored

    def eof_received(self) -> None:
        self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)
        self._lost()


class _RefusedConnection(asyncio.Protocol):
    """A connection above the limit: closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by isinstance: the transports of uvloop are no subclasses.
        cast(asyncio.Transport, transport).abort()


def _credentials(request: web.Request) -> tuple[str, str]:
    """Return the access key and the secret key of HTTP's Basic scheme; empty if there are none."""
    try:
        account = BasicAuth.decode(request.headers.get("Authorization", ""), encoding="utf-8")
    except ValueError:
        return "", ""
    return account.login, account.password
