"""Appending messages, beside the bare file calls."""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from pathlib import Path

import uvloop

from bench.measure import Row, alternate
from bench.samples import HOST, NOW_MS, directory, open_store, sample
from escrowmq.errors import StoreError
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.server.tasks import GroupCommit
from escrowmq.store.store import MessageStore

WRITERS = 64


def append_rate(
    count: int, batch: int, *, body_bytes: int = 1024, checkpoint: bool = False
) -> float:
    """Return records per second into a new store."""
    records = [sample(number, body_bytes=body_bytes) for number in range(count)]
    with directory() as path:
        store = open_store(path)
        began = time.perf_counter()
        for at in range(0, count, batch):
            store.append(records[at : at + batch], now_ms=NOW_MS)
        if checkpoint:
            store.checkpoint()
        rate = count / (time.perf_counter() - began)
        store.abandon()
    return rate


def raw_rate(count: int, batch: int, *, body_bytes: int = 1024) -> float:
    """Return records per second of one pwrite per batch and nothing else."""
    size = len(encode_record(sample(0, body_bytes=body_bytes), 0, 0, NOW_MS, HOST))
    data = b"x" * size * batch
    with directory() as path:
        descriptor = os.open(path / "raw", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 1 << 30)
        began = time.perf_counter()
        for at in range(0, count * size, len(data)):
            os.pwrite(descriptor, data, at)
        rate = count / (time.perf_counter() - began)
        os.close(descriptor)
    return rate


def fsync_each_rate(count: int) -> float:
    """Return records per second of one writer with one fsync per message."""
    with directory() as path:
        store = open_store(path)
        store.append([sample(0)], now_ms=NOW_MS)
        store.flush()
        began = time.perf_counter()
        for number in range(count):
            store.append([sample(number)], now_ms=NOW_MS)
            store.flush()
        rate = count / (time.perf_counter() - began)
        store.abandon()
    return rate


def group_commit_rate(count: int) -> float:
    """Return records per second of many writers that each wait until their message is durable."""
    with directory() as path:
        return uvloop.run(_group_commit(path, [sample(number) for number in range(count)]))


async def _group_commit(path: Path, records: list[NewRecord]) -> float:
    store = open_store(path)
    writers = Writers(store, GroupCommit(store), records)
    began = time.perf_counter()
    await writers.run()
    rate = len(records) / (time.perf_counter() - began)
    await writers.group.close()
    store.abandon()
    return rate


class Writers:
    """Serve writers as a broker does: one append per turn of the loop, and each writer is answered
    when its message is durable."""

    def __init__(self, store: MessageStore, group: GroupCommit, records: list[NewRecord]) -> None:
        self.group = group
        self._store = store
        self._remaining = iter(records)
        self._unanswered = len(records)
        self._arrived: list[NewRecord] = []
        self._done = asyncio.Event()

    async def run(self) -> None:
        for _ in range(WRITERS):
            self._send()
        await self._done.wait()

    def _send(self) -> None:
        record = next(self._remaining, None)
        if record is not None:
            if not self._arrived:
                asyncio.get_running_loop().call_soon(self._tick)
            self._arrived.append(record)

    def _tick(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._store.append(arrived, now_ms=NOW_MS)
        self.group.when_flushed(self._store.end, partial(self._answer, len(arrived)))

    def _answer(self, count: int, error: StoreError | None) -> None:
        assert error is None
        self._unanswered -= count
        if self._unanswered == 0:
            self._done.set()
        for _ in range(count):
            self._send()


def rows(*, quick: bool, rounds: int) -> list[Row]:
    count = 10_000 if quick else 100_000
    results = []
    for batch, body_bytes, goal in (
        (1, 1024, "100,000/s"),
        (64, 1024, "raw / 2"),
        (64, 16_384, "raw / 2"),
    ):
        many = count if body_bytes == 1024 else count // 8
        rate = alternate(
            {
                "store": partial(append_rate, many, batch, body_bytes=body_bytes),
                "raw": partial(raw_rate, many, batch, body_bytes=body_bytes),
            },
            rounds=rounds,
        )
        what = "one by one" if batch == 1 else f"in batches of {batch}"
        results.append(
            Row(
                f"append {body_bytes // 1024} KiB records {what}",
                f"{rate['store']:,.0f}/s",
                f"{rate['raw']:,.0f}/s, raw pwrite",
                f"{rate['store'] / rate['raw']:.2f}",
                goal,
            )
        )
    with_checkpoint = alternate(
        {
            "with": lambda: append_rate(count, 64, checkpoint=True),
            "without": lambda: append_rate(count, 64),
        },
        rounds=rounds,
    )
    results.append(
        Row(
            f"the same, with the checkpoint of {count:,} records",
            f"{with_checkpoint['with']:,.0f}/s",
            f"{with_checkpoint['without']:,.0f}/s, without",
            f"{with_checkpoint['with'] / with_checkpoint['without']:.2f}",
        )
    )
    durable = alternate(
        {
            "each": lambda: fsync_each_rate(100 if quick else 500),
            "group": lambda: group_commit_rate(2_000 if quick else 20_000),
        },
        rounds=rounds,
    )
    results.append(
        Row(
            f"durable sends, {WRITERS} writers waiting",
            f"{durable['group']:,.0f}/s",
            f"{durable['each']:,.0f}/s, one fsync per message",
            f"{durable['group'] / durable['each']:.1f}",
            "20",
        )
    )
    return results
