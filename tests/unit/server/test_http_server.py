"""The HTTP server for metrics and health: its pages, its limits, and clients that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from escrowmq.clock import SystemClock
from escrowmq.errors import StoreFailed
from escrowmq.metrics import Gauge, LabelValues, Registry, Samples
from escrowmq.server.http_server import HttpLimits, MetricsServer
from escrowmq.server.metrics import Health
from escrowmq.server.remoting_server import bind, bound_port

GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"


class Bench:
    """A server on loopback with its registry and health, and a client."""

    def __init__(self, port: int, registry: Registry, health: Health) -> None:
        self.port, self.registry, self.health = port, registry, health

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, request: bytes) -> tuple[int, str, bytes]:
        """Return status, headers and body. Status 0 means that the connection was closed."""
        reader, writer = await self.connect()
        writer.write(request)
        try:
            response = await reader.read()
        except ConnectionError:
            response = b""
        writer.close()
        if not response:
            return 0, "", b""
        head, _, body = response.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head.decode(), body

    async def get(self, path: str) -> tuple[int, str, bytes]:
        return await self.send(GET % path.encode())


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Bench]:
    registry, health = Registry(), Health()
    registry.add(lambda: [Gauge("a", "A.").value(1)])
    server = MetricsServer(registry, SystemClock(), health.not_ready_reason, HttpLimits(**limits))
    bound = bind("127.0.0.1", 0)
    port = bound_port(bound)
    await server.listen(bound)
    health.reason = None
    try:
        yield Bench(port, registry, health)
    finally:
        await server.close()


async def test_the_metrics_page_has_a_content_type_and_a_length() -> None:
    async with serving() as bench:
        status, head, body = await bench.get("/metrics")
        assert status == 200
        assert "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in head
        assert f"Content-Length: {len(body)}\r\n" in head
        assert body == b"# HELP a A.\n# TYPE a gauge\na 1\n"
        assert (await bench.get("/metrics?name=a"))[2] == body


async def test_head_gets_no_body() -> None:
    async with serving() as bench:
        status, head, body = await bench.send(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body) == (200, b"")
        assert "Content-Length: 31\r\n" in head


async def test_a_server_is_ready_while_every_check_passes() -> None:
    async with serving() as bench:
        reasons: list[str] = []
        bench.health.add(lambda: reasons[0] if reasons else None)
        assert (await bench.get("/health/ready"))[::2] == (200, b"ok\n")
        reasons.append("no disk space")
        assert (await bench.get("/health/ready"))[::2] == (503, b"no disk space\n")
        bench.health.reason = "stopping"
        assert (await bench.get("/health/ready"))[::2] == (503, b"stopping\n")
        assert (await bench.get("/health/live"))[::2] == (200, b"ok\n")


async def test_other_paths_are_not_found() -> None:
    async with serving() as bench:
        for path in ("/", "/metricsx", "/metrics/", "/health", "/../metrics", "//metrics"):
            assert (await bench.get(path))[0] == 404, path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused(method: str) -> None:
    async with serving() as bench:
        request = f"{method} /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
        status, head, _ = await bench.send(request)
        assert status == 405
        assert "Allow: GET,HEAD\r\n" in head


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET\r\n\r\n",
        b"GET metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
    ],
)
async def test_a_request_that_is_not_http_is_refused_and_the_server_continues(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as bench:
        assert (await bench.send(request_bytes))[0] == 400
        assert (await bench.get("/metrics"))[0] == 200
    assert caplog.records == []  # a port scan must not fill the log


async def test_a_request_that_is_too_long_is_refused() -> None:
    async with serving(line_bytes_max=1000) as bench:
        long = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 1_000_000
        # The server may close the connection before the client has sent everything.
        assert (await bench.send(long))[0] in (400, 0)
        assert (await bench.send(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2000))[0] == 400
        assert (await bench.get("/metrics"))[0] == 200


async def test_a_request_with_too_many_bytes_in_all_is_dropped_before_it_is_complete() -> None:
    # Neither a line nor the number of lines is too long, and no timeout ends it.
    async with serving(
        request_bytes_max=5_000, headers_max=10_000, request_timeout_s=3_600
    ) as bench:
        line = b"X-%d: " + b"x" * 80 + b"\r\n"
        request = b"GET /health/live HTTP/1.1\r\n" + b"".join(line % n for n in range(100))
        reader, writer = await bench.connect()
        writer.write(request[:4_900])
        assert (await bench.get("/health/live"))[0] == 200
        assert not reader.at_eof()  # it may still become a complete request
        writer.write(request[4_900:])
        async with asyncio.timeout(30):
            assert await read_all(reader) == b""
        writer.close()
        assert (await bench.get("/metrics"))[0] == 200


async def test_a_short_request_that_arrives_with_too_much_behind_it_is_dropped_whole() -> None:
    async with serving(request_bytes_max=5_000, request_timeout_s=3_600) as bench:
        async with asyncio.timeout(30):
            assert (await bench.send(GET % b"/health/live" + b"x" * 6_000))[0] == 0


async def test_an_incomplete_request_is_dropped_after_the_timeout() -> None:
    async with serving(request_timeout_s=0.05) as bench:
        assert (await bench.send(b"GET /metrics HT"))[0] == 0
        assert (await bench.send(b""))[0] == 0


async def test_a_connection_gets_one_response() -> None:
    async with serving() as bench:
        reader, writer = await bench.connect()
        writer.write((GET % b"/health/live") * 2)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
        writer.close()


async def test_a_client_that_leaves_in_the_middle_of_a_request_frees_its_connection() -> None:
    async with serving(connections_max=1) as bench:
        for _ in range(3):
            reader, writer = await bench.connect()
            writer.write(b"GET /metr")
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert (await bench.get("/metrics"))[0] == 200


async def test_half_sent_requests_do_not_keep_a_probe_out() -> None:
    async with serving(connections_max=4) as bench:
        held = [await bench.connect() for _ in range(20)]
        for _, writer in held:
            writer.write(b"GET /health/live HTTP/1.1\r\nHo")
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert (await bench.get(path))[0] == 200, path
        closed = held[:10]  # the oldest
        for reader, writer in closed:
            assert await read_all(reader) == b""
            writer.close()
        for _, writer in held[10:]:
            writer.close()


async def test_pages_that_are_not_read_do_not_keep_a_probe_out() -> None:
    async with serving(response_timeout_s=60, connections_max=6, pages_max=2) as bench:
        bench.registry.add(
            lambda: [Gauge("b", "B.", ("x",)).samples((("y" * 1000,), n) for n in range(20_000))]
        )
        held = [await bench.connect() for _ in range(10)]
        for _, writer in held:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET % b"/metrics")
        while (await bench.get("/metrics"))[0] != 503:
            pass  # the pages are not being sent yet
        assert (await bench.get("/health/live"))[0] == 200
        for _, writer in held:
            writer.transport.abort()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the server closes the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_a_scraper_that_does_not_read_is_dropped() -> None:
    async with serving(response_timeout_s=0.05, connections_max=1) as bench:
        bench.registry.add(
            lambda: [Gauge("b", "B.", ("x",)).samples((("y" * 1000,), n) for n in range(20_000))]
        )
        reader, writer = await bench.connect()
        transport = writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]  # a transport of a socket has it
        writer.write(GET % b"/metrics")
        while (await bench.get("/health/live"))[0] != 200:
            pass  # the connection that does not read still takes the only place
        transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(20_000_000)
        writer.close()


async def test_other_tasks_run_while_a_long_page_is_rendered() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turn_of_sample: list[int] = []

    def samples() -> Iterator[tuple[LabelValues, float]]:
        for number in range(1000):
            turn_of_sample.append(turns)
            yield (str(number),), 1

    async with serving(render_slice_s=0) as bench:
        bench.registry.add(lambda: [Gauge("b", "B.", ("n",)).samples(samples())])
        worker = asyncio.create_task(work())
        assert (await bench.get("/metrics"))[0] == 200
        worker.cancel()
    assert len(set(turn_of_sample)) > 500


async def test_a_failing_collector_affects_only_its_page() -> None:
    def fail() -> Iterator[Samples]:
        raise ZeroDivisionError
        yield

    async with serving() as bench:
        bench.registry.add(fail)
        assert (await bench.get("/metrics"))[::2] == (500, b"the request failed, see the log\n")
        assert (await bench.get("/health/live"))[0] == 200


async def test_a_closed_store_is_reported_as_unavailable() -> None:
    def closed() -> Iterator[Samples]:
        raise StoreFailed("the store is closed")
        yield

    async with serving() as bench:
        bench.registry.add(closed)
        assert (await bench.get("/metrics"))[::2] == (503, b"the store is closed\n")
