"""One client misbehaves, or the disk does: nobody else notices, and memory stays bounded.

A clock that jumps is in tests/unit/test_clock.py, where the clock is ours.
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
from tests.chaos.faults import SmallDisk
from tests.interop.remoting import Client, ResponseError
from tests.support.brokers import Served
from tests.support.clients import numbered, receive, send, until
from tests.support.ports import free_ports
from tests.support.scraping import scrape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUSY, ILLEGAL, NOT_AVAILABLE = 2, 13, 14
MIB = 1 << 20
COMPRESSED = 1  # of sysFlag


@contextlib.contextmanager
def serving(directory: Path, **conf: object) -> Iterator[tuple[Served, Callable[..., float]]]:
    """A broker, and one figure of its metrics."""
    [port] = free_ports(1)
    metrics = {"metricsExporterType": "PROM", "metricsPromExporterPort": port}
    with Served(directory, conf={**metrics, **conf}) as served:
        yield served, lambda name, **labels: scrape(f"127.0.0.1:{port}").value(name, **labels)
    served.assert_clean()
    assert "Traceback" not in served.errors


def code_of(client: Client, topic: str, body: bytes = b"x", **more: object) -> int:
    try:
        client.send(topic, body, **more)  # type: ignore[arg-type]
    except ResponseError as refused:
        return refused.response.code
    return 0


def rss_mib(served: Served) -> float:
    """Its own, without the pages of the log that it maps."""
    for line in Path(f"/proc/{served.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise ValueError("no RssAnon")


async def test_a_disk_that_does_not_keep_up_is_answered_with_system_busy(tmp_path: Path) -> None:
    slow = {"flushIntervalCommitLog": 10_000_000, "escrowCheckpointInterval": 10_000_000}
    with (
        serving(tmp_path, escrowUnflushedBytesMax=16 * MIB, **slow) as (served, figure),
        served.client() as client,
    ):
        codes = [code_of(client, "t", b"x" * MIB) for _ in range(20)]
        assert codes == [0] * 16 + [BUSY] * 4
        assert len(client.pull_all("t", 0)) == 16  # reads go on
        assert figure("escrowmq_busy_refusals_total", limit="unflushed") == 4
        text = served.conf.read_text().replace(f"Max={16 * MIB}", f"Max={64 * MIB}")
        served.conf.write_text(text)
        served.hang_up()
        await until(lambda: code_of(client, "t") == 0)


async def test_a_full_disk_refuses_sends_and_serves_reads(tmp_path: Path) -> None:
    with SmallDisk(tmp_path / "data", mib=64) as disk:
        if not disk.is_mounted:
            pytest.skip(f"no small disk: {disk.mount_error}")
        conf = {"cleanResourceInterval": 100, "diskSpaceCleanForciblyRatio": 100}
        with serving(tmp_path, **conf) as (served, figure), served.client() as client:
            assert code_of(client, "t") == 0
            disk.fill()
            await until(lambda: code_of(client, "t") == NOT_AVAILABLE)
            await until(lambda: figure("escrowmq_store_writable") == 0)
            assert [record.body for record in client.pull_all("t", 0)][:1] == [b"x"]
            disk.free()
            await until(lambda: code_of(client, "t", b"again") == 0)
            assert client.pull_all("t", 0)[-1].body == b"again"
            served.kill()
            served.start()
            with served.client() as later:
                assert later.pull_all("t", 0)[-1].body == b"again"


async def test_one_connection_sends_too_much_and_another_is_not_refused(tmp_path: Path) -> None:
    with (
        serving(tmp_path, escrowConnectionSendsMax=50) as (served, figure),
        served.client() as greedy,
        served.client() as modest,
    ):
        codes = [code_of(greedy, "t") for _ in range(2_000)]
        assert codes.count(0) >= 50
        assert set(codes) == {0, BUSY}
        assert [code_of(modest, "t") for _ in range(50)] == [0] * 50
        assert figure("escrowmq_busy_refusals_total", limit="connection") == codes.count(BUSY)


async def test_our_producer_gets_through_when_it_is_told_that_the_broker_is_busy(
    tmp_path: Path,
) -> None:
    """SYSTEM_BUSY is an error that may be tried again, and nothing has happened."""
    with serving(tmp_path, escrowTopicSendsMax=20) as (served, _):
        async with Producer(served.namesrv_address, group="p") as producer:
            sent = 0
            while sent < 25:
                with contextlib.suppress(Exception):
                    await producer.send(Message("t", b"%d" % sent))
                    sent += 1
                await asyncio.sleep(0.01)
        with served.client() as client:
            bodies = [r.body for queue in range(4) for r in client.pull_all("t", queue)]
        assert sorted(bodies) == sorted(b"%d" % number for number in range(25))


async def test_clients_that_send_half_a_frame_and_wait(tmp_path: Path) -> None:
    """Together they would hold 200 MiB; they may hold 16."""
    conf = {"escrowInFlightBytesMax": 16 * MIB, "escrowConnectionInFlightBytesMax": 16 * MIB}
    with serving(tmp_path, **conf) as (served, figure), served.client() as client:
        client.create_topic("t")
        before_mib = rss_mib(served)
        begun = (4 * MIB).to_bytes(4, "big") + (100).to_bytes(4, "big") + b" " * MIB
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                half = stack.enter_context(served.client())
                with contextlib.suppress(ConnectionError):
                    half.socket.sendall(begun)
                assert code_of(client, "t") == 0
            await until(lambda: figure("escrowmq_dropped_partial_total", port="broker") >= 150)
            assert figure("escrowmq_partial_bytes", port="broker") <= 16 * MIB
            assert rss_mib(served) - before_mib < 100
        await until(lambda: figure("escrowmq_partial_bytes", port="broker") == 0)


async def test_half_a_frame_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with (
        serving(tmp_path, serverChannelMaxIdleTimeSeconds=2) as (served, figure),
        served.client() as slow,
        served.client() as client,
    ):

        def trickle() -> bool:
            """A byte each time, so it is never silent for two seconds."""
            with contextlib.suppress(OSError):
                slow.socket.sendall(b" ")
            assert code_of(client, "t") == 0
            return figure("escrowmq_dropped_partial_total", port="broker") == 1

        slow.socket.sendall((1000).to_bytes(4, "big") + (100).to_bytes(4, "big"))
        await until(trickle)


@pytest.mark.parametrize("count", [400, pytest.param(9_900, marks=pytest.mark.nightly)])
async def test_thousands_of_idle_connections(tmp_path: Path, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 500:
        pytest.skip(f"only {hard} files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with serving(tmp_path, serverChannelMaxIdleTimeSeconds=3_000) as (served, figure):
            with contextlib.ExitStack() as stack:
                host, _, port = served.address.partition(":")
                before_mib = rss_mib(served)
                for _ in range(count):
                    stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                await until(lambda: figure("escrowmq_connections", port="broker") >= count)
                assert (rss_mib(served) - before_mib) / count < 0.05  # 50 KiB each, and not more
                await send(served, "t", *numbered(50))
                async with Consumer(
                    served.namesrv_address, group="g", subscribe={"t": "*"}
                ) as consumer:
                    assert sorted(await receive(consumer, 50)) == numbered(50)
            await until(lambda: figure("escrowmq_connections", port="broker") < 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_consumer_that_never_acknowledges(tmp_path: Path) -> None:
    """Its group stands still, and everything is there for who comes after it."""
    with serving(tmp_path) as (served, _):
        held: list[bytes] = []

        async def never(message: ReceivedMessage) -> None:
            held.append(message.body)
            await asyncio.Event().wait()

        stuck = Consumer(
            served.namesrv_address, group="stuck", concurrency=4, shutdown_timeout_s=0.1
        )
        stuck.on("t")(never)
        await send(served, "t", *numbered(100))
        running = asyncio.create_task(stuck.run())
        await until(lambda: len(held) == 4)
        async with Consumer(served.namesrv_address, group="g", subscribe={"t": "*"}) as consumer:
            assert sorted(await receive(consumer, 100)) == numbered(100)
        await stuck.close()
        await running
        async with Consumer(
            served.namesrv_address, group="stuck", subscribe={"t": "*"}
        ) as consumer:
            assert sorted(await receive(consumer, 100)) == numbered(100)


async def test_poison_messages(tmp_path: Path) -> None:
    """Properties that are too long are refused. A body that is not what it says, or properties
    that are as long as they may be, hold nobody up."""
    with serving(tmp_path) as (served, _), served.client() as client:
        client.create_topic("t", queues=1)
        assert code_of(client, "t", properties={"a": "x" * 40_000}) == ILLEGAL
        assert code_of(client, "t", properties={"a": "x\0y"}) == ILLEGAL
        client.send("t", b"first")
        client.send("t", b"not compressed at all", sys_flag=COMPRESSED)
        client.send("t", b"\xff" * 100_000, sys_flag=COMPRESSED | 0x300)
        client.send("t", b"", {"a": "x" * 32_000})
        client.send("t", b"last")
        assert len(client.pull_all("t", 0)) == 5
        async with Consumer(served.namesrv_address, group="g", subscribe={"t": "*"}) as consumer:
            assert await receive(consumer, 3) == [b"first", b"", b"last"]
