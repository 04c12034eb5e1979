"""Run clients and faults for a while, wait until everything is delivered, and report violations."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from escrowmq.native import SWITCH, load_native
from tests.chaos import actors
from tests.chaos.actors import (
    CONSUMED,
    FAILING,
    QUEUES,
    RETRY_GROUP,
    RawDelays,
    RawForger,
    RawReader,
    RawRetries,
    RawSender,
    RawTransactions,
    RawWorker,
    Stop,
)
from tests.chaos.faults import UNSUPPORTED, Faults, SmallDisk, print_progress
from tests.chaos.ledger import Fate, Ledger, Queue
from tests.chaos.relay import Relay
from tests.interop.records import Record
from tests.interop.remoting import Client
from tests.support.brokers import Server
from tests.support.ports import free_ports
from tests.support.scraping import scrape

DELIVERY_TIMEOUT_S: Final = 120.0
GROUPS: Final = ("chaos-push", "chaos-orderly", "chaos-raw")
VIOLATIONS_SHOWN: Final = 20


@dataclass
class Report:
    """The result of a run."""

    seed: int
    flush_mode: str
    request_path: str
    seconds: float  # duration of the faults
    ledger: Ledger
    fault_counts: Counter[str]
    reset_count: int
    stored_count: int
    violations: list[str]
    skipped: dict[str, str]  # faults that were not injected, with the reason

    def __str__(self) -> str:
        fates = ", ".join(f"{self.ledger.count(fate)} {fate.value}" for fate in Fate)
        lines = [
            f"seed {self.seed}, {self.flush_mode}, {self.request_path} path, "
            f"{self.seconds:.0f} s of faults",
            "done: "
            + ", ".join(f"{count} x {name}" for name, count in self.fault_counts.most_common()),
            f"connections reset: {self.reset_count}",
            f"messages: {len(self.ledger.fates)} ({fates}); {self.stored_count} in the queues",
        ]
        for group in GROUPS:
            consumed = self.ledger.consumed[group]
            repeated_count = consumed.total() - len(consumed)
            lines.append(f"{group}: {len(consumed)} messages, {repeated_count} repeated")
        prefixes = Counter(body.partition(b"/")[0].decode() for body in self.ledger.fates)
        lines.append(", ".join(f"{count} {prefix}" for prefix, count in sorted(prefixes.items())))
        lines.append(
            f"sent back: {len(self.ledger.retries)}, forged requests: "
            f"{self.ledger.refused_forgeries}"
        )
        lines.append(
            f"kills: {self.fault_counts['kill'] + self.fault_counts['kill on a full disk']}, "
            f"lost: {self.ledger.lost_count}, doubled: {self.ledger.doubled_count}"
        )
        lines += [f"skipped: {fault}: {reason}" for fault, reason in self.skipped.items()]
        lines += [f"VIOLATION: {text}" for text in self.violations[:VIOLATIONS_SHOWN]]
        lines.append(
            f"{len(self.violations)} wrong" if self.violations else "every message accounted for"
        )
        return "\n".join(lines)


def conf(flush_mode: str, metrics_port: int) -> dict[str, object]:
    return {
        "brokerIP1": "127.0.0.2",
        "flushDiskType": flush_mode,
        "messageDelayLevel": "1s 2s 4s 1s 1s 1s",
        "flushDelayOffsetInterval": 500,
        "transactionTimeOut": 1000,
        "transactionCheckInterval": 1000,
        "transactionCheckMax": 10_000,
        "diskMaxUsedSpaceRatio": 100,
        "diskSpaceCleanForciblyRatio": 100,  # expired messages cannot be accounted for
        "diskSpaceWarningLevelRatio": 95,
        "cleanResourceInterval": 300,
        "flushConsumerOffsetInterval": 500,
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": metrics_port,
    }


async def run(
    directory: Path,
    *,
    seconds: float,
    seed: int,
    flush_mode: str = "",
    request_path: str = "",
    kills: int = 0,
) -> Report:
    """Run with faults for `seconds`, or with this number of kills, and check every message.

    `flush_mode`: SYNC_FLUSH or ASYNC_FLUSH. `request_path`: native or python. By default the seed
    chooses: of four seeds that follow each other, each has another combination.
    """
    flush_mode = flush_mode or ("SYNC_FLUSH" if seed % 2 else "ASYNC_FLUSH")
    request_path = request_path or ("python" if seed // 2 % 2 else "native")
    if load_native({}).module is None:
        request_path = "python"
    environment = {SWITCH: "0" if request_path == "python" else "1"}
    [metrics_port] = free_ports(1)
    served = Server(
        directory, conf=conf(flush_mode, metrics_port), wait_s=60, environment=environment
    )
    ledger = Ledger()
    minutes = seconds / 60 + kills / 10
    with SmallDisk(served.data, mib=192 + int(minutes * 64)) as disk, served:
        with served.client() as admin:
            for topic in (*CONSUMED, FAILING):
                admin.create_topic(topic, queues=QUEUES)
            for group in ("chaos-raw", RETRY_GROUP):
                admin.create_group(group)
        port = int(served.address.rpartition(":")[2])
        async with Relay(port) as relay:
            faults = Faults(served, relay, disk, seed)
            async with _clients(served.namesrv_address, f"127.0.0.2:{port}", ledger, seed) as stop:
                # Clients fail at their start if the broker is down, so wait for all groups.
                await _wait_while(
                    lambda: "" if ledger.is_read_by(GROUPS) else "a group has not read"
                )
                start_s = time.monotonic()
                if kills:
                    await faults.kill_repeatedly(kills)
                else:
                    await faults.inject(seconds)
                fault_seconds = time.monotonic() - start_s
                stop.set()
                print_progress("waiting for deliveries")
                await _wait_for_deliveries(served, f"127.0.0.1:{metrics_port}", ledger)
        stored = await asyncio.to_thread(_stored, served)
        retries = await asyncio.to_thread(_retries, served)
        violations = ledger.check(stored, retries)
        bodies = _consumed_bodies(stored)
        for group in GROUPS:
            violations += [
                f"{group} never received {body!r}" for body in ledger.unread(group, bodies)
            ]
        served.stop()
        served.assert_clean()
    skipped = dict(UNSUPPORTED) | ({} if disk.is_mounted else {"full disk": disk.mount_error})
    count = sum(map(len, stored.values()))
    return Report(
        seed,
        flush_mode,
        request_path,
        fault_seconds,
        ledger,
        faults.counts,
        relay.reset_count,
        count,
        violations,
        skipped,
    )


@contextlib.asynccontextmanager
async def _clients(servers: str, address: str, ledger: Ledger, seed: int) -> AsyncIterator[Stop]:
    """Start all clients. The yielded signal stops the senders.

    Consumers and checkers continue until the context is left.
    """
    stop, end = Stop(), Stop()
    generator = random.Random(seed + 1)
    tasks = [
        asyncio.create_task(client)
        for client in (
            actors.send_plain(servers, ledger, stop, 0),
            actors.send_plain(servers, ledger, stop, 1),
            actors.run_transactions(servers, ledger, stop, 0, generator),
            actors.run_transactions(servers, ledger, stop, 1, generator),
            actors.consume(servers, ledger, "chaos-push", generator),
            actors.consume_in_order(servers, ledger, "chaos-orderly"),
        )
    ]
    raw_workers = [
        RawWorker(address, stop, RawSender(ledger, "raw2", 2).step),
        RawWorker(address, stop, RawSender(ledger, "raw3", 3).step),
        RawWorker(address, stop, RawTransactions(ledger, "raw", seed).step),
        RawWorker(address, stop, RawDelays(ledger, "raw", seed).step),
        RawWorker(address, stop, RawRetries(ledger, "raw").step),
        RawWorker(address, stop, RawForger(ledger, "raw", seed).step),
        RawWorker(address, end, RawReader(ledger, "chaos-raw").step),
    ]
    try:
        yield stop
        for task in tasks[2:]:
            if task.done():
                task.result()
                raise AssertionError("a client has ended too early")
        await asyncio.gather(*tasks[:2])
    finally:
        stop.set()
        end.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for worker in raw_workers:
        await asyncio.to_thread(worker.join, 60)


async def _wait_for_deliveries(served: Server, metrics: str, ledger: Ledger) -> None:
    """Wait until no transaction is open and every group has read everything, or a timeout."""

    def pending() -> str:
        samples = scrape(metrics)
        if count := samples.value("escrowmq_open_transactions"):
            return f"{count:.0f} transactions are open"
        if count := samples.value("escrowmq_delayed_messages_waiting"):
            return f"{count:.0f} delayed messages wait"
        stored = _stored(served)
        if count := len(
            ledger.missing(record.body for queue in stored.values() for record in queue)
        ):
            return f"{count} messages are missing"
        if count := len(ledger.missing_retries(record.body for record in _retries(served))):
            return f"{count} retries are missing"
        bodies = _consumed_bodies(stored)
        unread = {group: len(ledger.unread(group, bodies)) for group in GROUPS}
        return "" if not any(unread.values()) else f"not read yet: {unread}"

    await _wait_while(pending)


async def _wait_while(pending: Callable[[], str]) -> None:
    """Wait until `pending` returns an empty text, or a timeout; print the text meanwhile.

    A timeout is no failure: the ledger reports the violations in detail.
    """
    deadline_s = time.monotonic() + DELIVERY_TIMEOUT_S
    while (text := await asyncio.to_thread(pending)) and time.monotonic() < deadline_s:
        print_progress(f"           {text}")
        await asyncio.sleep(1)


def _stored(served: Server) -> dict[Queue, list[Record]]:
    with Client(served.address, timeout_s=60) as client:
        return {
            (topic, queue_id): client.pull_all(topic, queue_id)
            for topic in (*CONSUMED, FAILING)
            for queue_id in range(QUEUES)
        }


def _retries(served: Server) -> list[Record]:
    with Client(served.address, timeout_s=60) as client:
        topic = f"%RETRY%{RETRY_GROUP}"
        return [] if client.max_offset(topic, 0) <= 0 else client.pull_all(topic, 0)


def _consumed_bodies(stored: dict[Queue, list[Record]]) -> set[bytes]:
    """Return the bodies that every group has to read."""
    return {
        record.body
        for (topic, _), records in stored.items()
        if topic in CONSUMED
        for record in records
    }
