"""A misbehaving client or a slow disk does not affect other clients, and memory stays bounded.

Jumps of the wall clock are tested in tests/unit/test_clock.py with a ManualClock.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from escrowmq import Consumer, Message, Producer, ReceivedMessage
from escrowmq.errors import RequestRefused
from tests.chaos.faults import SmallDisk
from tests.interop.remoting import Client, ResponseError
from tests.support.brokers import Server
from tests.support.clients import WAIT_S, numbered_bodies, receive, send
from tests.support.ports import free_ports
from tests.support.scraping import scrape
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUSY, ILLEGAL, NOT_AVAILABLE = 2, 13, 14
MIB = 1 << 20
COMPRESSED = 1  # a bit of sysFlag


@contextlib.contextmanager
def broker_with_metrics(
    directory: Path, **conf: object
) -> Iterator[tuple[Server, Callable[..., float]]]:
    """Run a broker. Yields it and a function that returns the current value of a metric."""
    [port] = free_ports(1)
    metrics = {"metricsExporterType": "PROM", "metricsPromExporterPort": port}
    with Server(directory, conf={**metrics, **conf}) as served:
        yield served, lambda name, **labels: scrape(f"127.0.0.1:{port}").value(name, **labels)
    served.assert_clean()
    assert "Traceback" not in served.errors


def send_code(client: Client, topic: str, body: bytes = b"x", **options: object) -> int:
    """Send a message and return the code of the response, also that of a refusal."""
    try:
        client.send(topic, body, **options)  # type: ignore[arg-type]
    except ResponseError as refused:
        return refused.response.code
    return 0


def rss_mib(served: Server) -> float:
    """Return the anonymous memory of a broker, without the mapped pages of the log."""
    for line in Path(f"/proc/{served.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise ValueError("no RssAnon")


async def test_sends_are_refused_with_system_busy_while_too_much_is_unflushed(
    tmp_path: Path,
) -> None:
    no_flush = {"flushIntervalCommitLog": 10_000_000, "escrowCheckpointInterval": 10_000_000}
    with (
        broker_with_metrics(tmp_path, escrowUnflushedBytesMax=16 * MIB, **no_flush) as (
            served,
            metric,
        ),
        served.client() as client,
    ):
        codes = [send_code(client, "t", b"x" * MIB) for _ in range(20)]
        assert codes == [0] * 16 + [BUSY] * 4
        assert len(client.pull_all("t", 0)) == 16  # reads still work
        assert metric("escrowmq_busy_refusals_total", limit="unflushed") == 4
        text = served.conf.read_text().replace(f"Max={16 * MIB}", f"Max={64 * MIB}")
        served.conf.write_text(text)
        served.reload()
        await wait_until_async(lambda: send_code(client, "t") == 0)


async def test_a_full_disk_refuses_sends_and_serves_reads(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "data", mib=64) as disk:
        if not disk.is_mounted:
            pytest.skip(f"no small disk: {disk.mount_error}")
        conf = {"cleanResourceInterval": 100, "diskSpaceCleanForciblyRatio": 100}
        with broker_with_metrics(tmp_path, **conf) as (served, metric), served.client() as client:
            assert send_code(client, "t") == 0
            disk.fill()
            await wait_until_async(lambda: send_code(client, "t") == NOT_AVAILABLE)
            await wait_until_async(lambda: metric("escrowmq_store_writable") == 0)
            assert [record.body for record in client.pull_all("t", 0)][:1] == [b"x"]
            disk.free()
            await wait_until_async(lambda: send_code(client, "t", b"again") == 0)
            assert client.pull_all("t", 0)[-1].body == b"again"
            served.kill()
            served.start()
            with served.client() as new_client:
                assert new_client.pull_all("t", 0)[-1].body == b"again"


async def test_a_connection_that_sends_too_much_does_not_cause_refusals_of_another(
    tmp_path: Path,
) -> None:
    with (
        broker_with_metrics(tmp_path, escrowConnectionSendsMax=50) as (served, metric),
        served.client() as heavy,
        served.client() as light,
    ):
        codes = [send_code(heavy, "t") for _ in range(2_000)]
        assert codes.count(0) >= 50
        assert set(codes) == {0, BUSY}
        assert [send_code(light, "t") for _ in range(50)] == [0] * 50
        assert metric("escrowmq_busy_refusals_total", limit="connection") == codes.count(BUSY)


async def test_our_producer_can_repeat_a_send_that_was_refused_with_system_busy(
    tmp_path: Path,
) -> None:
    """SYSTEM_BUSY means that nothing was stored, so a repeated send makes no duplicate."""
    with broker_with_metrics(tmp_path, escrowTopicSendsMax=20) as (served, _):
        async with Producer(served.namesrv_address, group="p") as producer:
            sent = 0
            async with asyncio.timeout(WAIT_S):
                while sent < 25:
                    with contextlib.suppress(RequestRefused):
                        await producer.send(Message("t", b"%d" % sent))
                        sent += 1
                    await asyncio.sleep(0.01)  # the back-off of an application
        with served.client() as client:
            bodies = [r.body for queue in range(4) for r in client.pull_all("t", queue)]
        assert sorted(bodies) == sorted(b"%d" % number for number in range(25))


async def test_memory_for_incomplete_frames_is_bounded(tmp_path: Path) -> None:
    """The clients send incomplete frames of 200 MiB in all; the broker holds at most 16 MiB."""
    conf = {"escrowInFlightBytesMax": 16 * MIB, "escrowConnectionInFlightBytesMax": 16 * MIB}
    with broker_with_metrics(tmp_path, **conf) as (served, metric), served.client() as client:
        client.create_topic("t")
        before_mib = rss_mib(served)
        incomplete = (4 * MIB).to_bytes(4, "big") + (100).to_bytes(4, "big") + b" " * MIB
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                slow = stack.enter_context(served.client())
                with contextlib.suppress(ConnectionError):
                    slow.socket.sendall(incomplete)
                assert send_code(client, "t") == 0
            await wait_until_async(
                lambda: metric("escrowmq_dropped_partial_total", port="broker") >= 150
            )
            assert metric("escrowmq_partial_bytes", port="broker") <= 16 * MIB
            assert rss_mib(served) - before_mib < 100
        await wait_until_async(lambda: metric("escrowmq_partial_bytes", port="broker") == 0)


async def test_a_connection_with_an_incomplete_frame_is_closed_after_the_idle_time(
    tmp_path: Path,
) -> None:
    with (
        broker_with_metrics(tmp_path, serverChannelMaxIdleTimeSeconds=2) as (served, metric),
        served.client() as slow,
        served.client() as client,
    ):

        def trickle() -> bool:
            """Send one more byte, so that the connection is never idle for two seconds."""
            with contextlib.suppress(OSError):
                slow.socket.sendall(b" ")
            assert send_code(client, "t") == 0
            return metric("escrowmq_dropped_partial_total", port="broker") == 1

        slow.socket.sendall((1000).to_bytes(4, "big") + (100).to_bytes(4, "big"))
        await wait_until_async(trickle)


@pytest.mark.parametrize("count", [400, pytest.param(9_900, marks=pytest.mark.nightly)])
async def test_idle_connections_cost_little_memory_and_do_not_affect_others(
    tmp_path: Path, count: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with broker_with_metrics(tmp_path, serverChannelMaxIdleTimeSeconds=3_000) as (
            served,
            metric,
        ):
            with contextlib.ExitStack() as stack:
                host, _, port = served.address.partition(":")
                before_mib = rss_mib(served)
                for _ in range(count):
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                await wait_until_async(
                    lambda: metric("escrowmq_connections", port="broker") >= count
                )
                assert (rss_mib(served) - before_mib) / count < 0.05  # at most 50 KiB each
                await send(served, "t", *numbered_bodies(50))
                async with Consumer(
                    served.namesrv_address, group="g", subscribe={"t": "*"}
                ) as consumer:
                    assert sorted(await receive(consumer, 50)) == numbered_bodies(50)
            await wait_until_async(lambda: metric("escrowmq_connections", port="broker") < 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_consumer_that_never_acknowledges_holds_up_only_its_own_group(
    tmp_path: Path,
) -> None:
    """After it is closed, the next member of the group gets all messages."""
    with broker_with_metrics(tmp_path) as (served, _):
        in_flight: list[bytes] = []

        async def never_return(message: ReceivedMessage) -> None:
            in_flight.append(message.body)
            await asyncio.Event().wait()

        stuck = Consumer(
            served.namesrv_address, group="stuck", concurrency=4, shutdown_timeout_s=0.1
        )
        stuck.on("t")(never_return)
        await send(served, "t", *numbered_bodies(100))
        running = asyncio.create_task(stuck.run())
        await wait_until_async(lambda: len(in_flight) == 4)
        async with Consumer(served.namesrv_address, group="g", subscribe={"t": "*"}) as consumer:
            assert sorted(await receive(consumer, 100)) == numbered_bodies(100)
        await stuck.close()
        await running
        async with Consumer(
            served.namesrv_address, group="stuck", subscribe={"t": "*"}
        ) as consumer:
            assert sorted(await receive(consumer, 100)) == numbered_bodies(100)


async def test_malformed_messages_are_refused_or_skipped(tmp_path: Path) -> None:
    """Properties that are too long are refused. The consumer skips a body that is not compressed
    although its flag says so, and receives properties of almost the maximum length."""
    with broker_with_metrics(tmp_path) as (served, _), served.client() as client:
        client.create_topic("t", queues=1)
        assert send_code(client, "t", properties={"a": "x" * 40_000}) == ILLEGAL
        assert send_code(client, "t", properties={"a": "x\0y"}) == ILLEGAL
        client.send("t", b"first")
        client.send("t", b"not compressed at all", sys_flag=COMPRESSED)
        client.send("t", b"\xff" * 100_000, sys_flag=COMPRESSED | 0x300)
        client.send("t", b"", {"a": "x" * 32_000})
        client.send("t", b"last")
        assert len(client.pull_all("t", 0)) == 5
        async with Consumer(served.namesrv_address, group="g", subscribe={"t": "*"}) as consumer:
            assert await receive(consumer, 3) == [b"first", b"", b"last"]
