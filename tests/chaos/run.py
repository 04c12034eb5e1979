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

from tests.chaos import actors
from tests.chaos.actors import (
    PLAIN,
    QUEUES,
    TRANSACTIONAL,
    RawReader,
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
from tests.support.brokers import Served
from tests.support.ports import free_ports
from tests.support.scraping import scrape

DELIVERY_TIMEOUT_S: Final = 120.0
GROUPS: Final = ("chaos-push", "chaos-orderly", "chaos-raw")
VIOLATIONS_SHOWN: Final = 20


@dataclass
class Report:
    """The result of a run."""

    seed: int
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
            f"seed {self.seed}, {self.seconds:.0f} s of faults",
            "done: "
            + ", ".join(f"{count} x {name}" for name, count in self.fault_counts.most_common()),
            f"connections reset: {self.reset_count}",
            f"messages: {len(self.ledger.fates)} ({fates}); {self.stored_count} in the queues",
        ]
        for group in GROUPS:
            consumed = self.ledger.consumed[group]
            repeated_count = consumed.total() - len(consumed)
            lines.append(f"{group}: {len(consumed)} messages, {repeated_count} repeated")
        lines += [f"skipped: {fault}: {reason}" for fault, reason in self.skipped.items()]
        lines += [f"VIOLATION: {text}" for text in self.violations[:VIOLATIONS_SHOWN]]
        lines.append(
            f"{len(self.violations)} wrong" if self.violations else "every message accounted for"
        )
        return "\n".join(lines)


def conf(seed: int, metrics_port: int) -> dict[str, object]:
    return {
        "brokerIP1": "127.0.0.2",
        "flushDiskType": "SYNC_FLUSH" if seed % 2 else "ASYNC_FLUSH",
        "messageDelayLevel": "1s 1s 1s 1s 1s 1s",
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


async def run(directory: Path, *, seconds: float, seed: int) -> Report:
    """Run with faults for `seconds`, and check every message."""
    [metrics_port] = free_ports(1)
    served = Served(directory, conf=conf(seed, metrics_port), wait_s=60)
    ledger = Ledger()
    with SmallDisk(served.data, mib=192 + int(seconds / 60 * 64)) as disk, served:
        with served.client() as admin:
            for topic in (PLAIN, TRANSACTIONAL):
                admin.create_topic(topic, queues=QUEUES)
            admin.create_group("chaos-raw")
        port = int(served.address.rpartition(":")[2])
        async with Relay(port) as relay:
            faults = Faults(served, relay, disk, seed)
            async with _clients(served.namesrv_address, f"127.0.0.2:{port}", ledger, seed) as stop:
                # Clients fail at their start if the broker is down, so wait for all groups.
                await _wait_while(
                    lambda: "" if ledger.is_read_by(GROUPS) else "a group has not read"
                )
                start_s = time.monotonic()
                await faults.inject(seconds)
                fault_seconds = time.monotonic() - start_s
                stop.set()
                print_progress("waiting for deliveries")
                await _wait_for_deliveries(served, f"127.0.0.1:{metrics_port}", ledger)
        stored = await asyncio.to_thread(_stored, served)
        violations = ledger.check(stored)
        bodies = {record.body for records in stored.values() for record in records}
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


async def _wait_for_deliveries(served: Served, metrics: str, ledger: Ledger) -> None:
    """Wait until no transaction is open and every group has read everything, or a timeout."""

    def pending() -> str:
        if count := scrape(metrics).value("escrowmq_open_transactions"):
            return f"{count:.0f} transactions are open"
        bodies = {record.body for records in _stored(served).values() for record in records}
        if count := len(ledger.missing(bodies)):
            return f"{count} messages are missing"
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


def _stored(served: Served) -> dict[Queue, list[Record]]:
    with Client(served.address, timeout_s=60) as client:
        return {
            (topic, queue_id): client.pull_all(topic, queue_id)
            for topic in (PLAIN, TRANSACTIONAL)
            for queue_id in range(QUEUES)
        }
