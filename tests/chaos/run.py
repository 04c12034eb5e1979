"""One run: start everything, break things for a while, let it settle, account for every message."""

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
from tests.chaos.actors import DECIDED, PLAIN, QUEUES, Raw, RawDecider, RawReader, RawSender, Stop
from tests.chaos.faults import NOT_HERE, Faults, SmallDisk, say
from tests.chaos.ledger import Fate, Ledger, Place
from tests.chaos.relay import Relay
from tests.interop.records import Record
from tests.interop.remoting import Client
from tests.support.brokers import Server
from tests.support.ports import free_ports
from tests.support.scraping import scrape

SETTLED_S: Final = 120.0
GROUPS: Final = ("chaos-push", "chaos-orderly", "chaos-raw")
SHOWN: Final = 20


@dataclass
class Report:
    seed: int
    seconds: float
    ledger: Ledger
    done: Counter[str]
    resets: int
    stored: int
    wrong: list[str]
    skipped: dict[str, str]

    def __str__(self) -> str:
        fates = ", ".join(f"{self.ledger.count(fate)} {fate.value}" for fate in Fate)
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s of faults",
            "done: " + ", ".join(f"{count} x {name}" for name, count in self.done.most_common()),
            f"connections reset: {self.resets}",
            f"messages: {len(self.ledger.fates)} ({fates}); {self.stored} in the queues",
        ]
        for group in GROUPS:
            seen = self.ledger.consumed[group]
            lines.append(f"{group}: {len(seen)} messages, {seen.total() - len(seen)} again")
        lines += [f"skipped: {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"WRONG: {what}" for what in self.wrong[:SHOWN]]
        lines.append(f"{len(self.wrong)} wrong" if self.wrong else "every message accounted for")
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
        "diskSpaceCleanForciblyRatio": 100,  # what is expired could not be accounted for
        "diskSpaceWarningLevelRatio": 95,
        "cleanResourceInterval": 300,
        "flushConsumerOffsetInterval": 500,
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": metrics_port,
    }


async def run(directory: Path, *, seconds: float, seed: int) -> Report:
    [metrics_port] = free_ports(1)
    served = Server(directory, conf=conf(seed, metrics_port), wait_s=60)
    ledger = Ledger()
    with SmallDisk(served.data, mib=192 + int(seconds / 60 * 64)) as disk, served:
        with served.client() as admin:
            for topic in (PLAIN, DECIDED):
                admin.create_topic(topic, queues=QUEUES)
            admin.create_group("chaos-raw")
        port = int(served.address.rpartition(":")[2])
        async with Relay(port) as relay:
            faults = Faults(served, relay, disk, seed)
            async with _working(served.namesrv_address, f"127.0.0.2:{port}", ledger, seed) as stop:
                # Who begins while nobody is there is told so at once: begin before.
                await _until_nothing(lambda: "" if ledger.is_read_by(GROUPS) else "nobody reads")
                began_s = time.monotonic()
                await faults.go_on(seconds)
                faulty_s = time.monotonic() - began_s
                stop.set()
                say("settling")
                await _settle(served, f"127.0.0.1:{metrics_port}", ledger)
        stored = await asyncio.to_thread(_stored, served)
        wrong = ledger.faults(stored)
        bodies = {record.body for records in stored.values() for record in records}
        for group in GROUPS:
            wrong += [f"{group} never got {body!r}" for body in ledger.unread(group, bodies)]
        served.stop()
        served.assert_clean()
    skipped = dict(NOT_HERE) | ({} if disk.is_mounted else {"full disk": disk.why})
    count = sum(map(len, stored.values()))
    return Report(seed, faulty_s, ledger, faults.done, relay.resets, count, wrong, skipped)


@contextlib.asynccontextmanager
async def _working(servers: str, address: str, ledger: Ledger, seed: int) -> AsyncIterator[Stop]:
    """Everybody; who reads and who answers goes on after the stop, until this is left."""
    stop, end = Stop(), Stop()
    choose = random.Random(seed + 1)
    tasks = [
        asyncio.create_task(one)
        for one in (
            actors.send_plainly(servers, ledger, stop, 0),
            actors.send_plainly(servers, ledger, stop, 1),
            actors.decide(servers, ledger, stop, 0, choose),
            actors.decide(servers, ledger, stop, 1, choose),
            actors.consume(servers, ledger, "chaos-push", choose),
            actors.consume_in_order(servers, ledger, "chaos-orderly"),
        )
    ]
    raws = [
        Raw(address, stop, RawSender(ledger, "raw2", 2).step),
        Raw(address, stop, RawSender(ledger, "raw3", 3).step),
        Raw(address, stop, RawDecider(ledger, "raw", seed).step),
        Raw(address, end, RawReader(ledger, "chaos-raw").step),
    ]
    try:
        yield stop
        for task in tasks[2:]:
            if task.done():
                task.result()
                raise AssertionError("somebody who should work on has ended")
        await asyncio.gather(*tasks[:2])
    finally:
        stop.set()
        end.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for raw in raws:
        await asyncio.to_thread(raw.join, 60)


async def _settle(served: Server, metrics: str, ledger: Ledger) -> None:
    """Until nothing is open and everybody has read everything; or until it is clear that not."""

    def left() -> str:
        if count := scrape(metrics).value("escrowmq_open_transactions"):
            return f"{count:.0f} transactions are open"
        bodies = {r.body for records in _stored(served).values() for r in records}
        if count := len(ledger.missing(bodies)):
            return f"{count} messages are missing"
        unread = {group: len(ledger.unread(group, bodies)) for group in GROUPS}
        return "" if not any(unread.values()) else f"not read yet: {unread}"

    await _until_nothing(left)


async def _until_nothing(left: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + SETTLED_S
    while (what := await asyncio.to_thread(left)) and time.monotonic() < deadline_s:
        say(f"           {what}")
        await asyncio.sleep(1)


def _stored(served: Server) -> dict[Place, list[Record]]:
    with Client(served.address, timeout_s=60) as client:
        return {
            (topic, queue_id): client.pull_all(topic, queue_id)
            for topic in (PLAIN, DECIDED)
            for queue_id in range(QUEUES)
        }
