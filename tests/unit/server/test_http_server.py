"""The pages for scrapers and probes, and clients that misbehave.

Each test runs its own event loop, with a real socket on loopback.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest

from escrowmq.clock import SystemClock
from escrowmq.errors import StoreFailed
from escrowmq.metrics import Gauge, LabelValues, Registry, Samples
from escrowmq.server.http_server import HttpLimits, MetricsServer
from escrowmq.server.metrics import Health
from escrowmq.server.remoting_server import bind, bound_port

GIVE_UP_S = 20
GET = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"

Test = Callable[..., Coroutine[Any, Any, None]]


def in_a_loop(test: Test) -> Callable[..., None]:
    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), GIVE_UP_S))

    return run


class Bench:
    def __init__(self, port: int, registry: Registry, health: Health) -> None:
        self.port, self.registry, self.health = port, registry, health

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> tuple[int, str, bytes]:
        """Return status, headers and body; status 0 if the connection was closed."""
        reader, writer = await self.connect()
        writer.write(request)
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        writer.close()
        if not answer:
            return 0, "", b""
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ")[1]), head.decode(), body

    async def get(self, path: str) -> tuple[int, str, bytes]:
        return await self.ask(GET % path.encode())


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


@in_a_loop
async def test_metrics_have_a_content_type_and_a_length() -> None:
    async with serving() as bench:
        status, head, body = await bench.get("/metrics")
        assert status == 200
        assert "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n" in head
        assert f"Content-Length: {len(body)}\r\n" in head
        assert body == b"# HELP a A.\n# TYPE a gauge\na 1\n"
        assert (await bench.get("/metrics?name=a"))[2] == body


@in_a_loop
async def test_head_gets_no_body() -> None:
    async with serving() as bench:
        status, head, body = await bench.ask(b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body) == (200, b"")
        assert "Content-Length: 31\r\n" in head


@in_a_loop
async def test_ready_while_every_check_passes() -> None:
    async with serving() as bench:
        missing: list[str] = []
        bench.health.add(lambda: missing[0] if missing else None)
        assert (await bench.get("/health/ready"))[::2] == (200, b"ok\n")
        missing.append("no room")
        assert (await bench.get("/health/ready"))[::2] == (503, b"no room\n")
        bench.health.reason = "stopping"
        assert (await bench.get("/health/ready"))[::2] == (503, b"stopping\n")
        assert (await bench.get("/health/live"))[::2] == (200, b"ok\n")


@in_a_loop
async def test_other_paths_are_not_found() -> None:
    async with serving() as bench:
        for path in ("/", "/metricsx", "/metrics/", "/health", "/../metrics", "//metrics"):
            assert (await bench.get(path))[0] == 404, path


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
@in_a_loop
async def test_other_methods_are_refused(method: str) -> None:
    async with serving() as bench:
        request = f"{method} /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
        status, head, _ = await bench.ask(request)
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
@in_a_loop
async def test_a_request_that_is_not_http_is_refused_and_the_server_goes_on(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as bench:
        assert (await bench.ask(request_bytes))[0] == 400
        assert (await bench.get("/metrics"))[0] == 200
    assert caplog.records == []  # a port scan must not fill the log


@in_a_loop
async def test_a_request_that_is_too_long_is_refused() -> None:
    async with serving(line_bytes_max=1000) as bench:
        long = b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 1_000_000
        assert (await bench.ask(long))[0] in (400, 0)  # 0: it closed while we still sent
        assert (await bench.ask(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 2000))[0] == 400
        assert (await bench.get("/metrics"))[0] == 200


@in_a_loop
async def test_an_incomplete_request_is_dropped_in_time() -> None:
    async with serving(request_timeout_s=0.05) as bench:
        assert (await bench.ask(b"GET /metrics HT"))[0] == 0
        assert (await bench.ask(b""))[0] == 0


@in_a_loop
async def test_a_connection_gets_one_response() -> None:
    async with serving() as bench:
        reader, writer = await bench.connect()
        writer.write((GET % b"/health/live") * 2)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 1
        writer.close()


@in_a_loop
async def test_a_client_that_leaves_in_the_middle_of_a_request_frees_its_connection() -> None:
    async with serving(connections_max=1) as bench:
        for _ in range(3):
            reader, writer = await bench.connect()
            writer.write(b"GET /metr")
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert (await bench.get("/metrics"))[0] == 200


@in_a_loop
async def test_a_connection_above_the_limit_is_closed_at_once() -> None:
    async with serving(connections_max=2) as bench:
        held = [await bench.connect() for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET")
        assert (await bench.get("/metrics"))[0] == 0
        held[0][1].write(b" /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await held[0][0].read()).endswith(b"ok\n")
        for _, writer in held:
            writer.close()
        while (await bench.get("/metrics"))[0] != 200:
            pass  # until the server has noticed that they are closed


@in_a_loop
async def test_a_scraper_that_does_not_read_is_dropped() -> None:
    async with serving(response_timeout_s=0.05, connections_max=1) as bench:
        bench.registry.add(
            lambda: [Gauge("b", "B.", ("x",)).samples((("y" * 1000,), n) for n in range(20_000))]
        )
        reader, writer = await bench.connect()
        transport = writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]  # it is one that reads
        writer.write(GET % b"/metrics")
        while (await bench.get("/health/live"))[0] != 200:
            pass  # until the deaf connection is dropped
        transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(20_000_000)
        writer.close()


@in_a_loop
async def test_other_tasks_run_while_a_long_page_is_rendered() -> None:
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    seen: list[int] = []

    def samples() -> Iterator[tuple[LabelValues, float]]:
        for number in range(1000):
            seen.append(turns)
            yield (str(number),), 1

    async with serving(render_slice_s=0) as bench:
        bench.registry.add(lambda: [Gauge("b", "B.", ("n",)).samples(samples())])
        worker = asyncio.create_task(work())
        assert (await bench.get("/metrics"))[0] == 200
        worker.cancel()
    assert len(set(seen)) > 500  # not all in one turn


@in_a_loop
async def test_a_failing_collector_affects_only_its_page() -> None:
    def fail() -> Iterator[Samples]:
        raise ZeroDivisionError
        yield

    async with serving() as bench:
        bench.registry.add(fail)
        assert (await bench.get("/metrics"))[::2] == (500, b"the request failed, see the log\n")
        assert (await bench.get("/health/live"))[0] == 200


@in_a_loop
async def test_a_closed_store_is_reported_as_unavailable() -> None:
    def closed() -> Iterator[Samples]:
        raise StoreFailed("the store is closed")
        yield

    async with serving() as bench:
        bench.registry.add(closed)
        assert (await bench.get("/metrics"))[::2] == (503, b"the store is closed\n")
