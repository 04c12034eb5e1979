"""Reading slices of 32 messages, beside copying the same bytes."""

from __future__ import annotations

import time
from functools import partial

from bench.measure import Row, alternate
from bench.samples import NOW_MS, TOPIC, directory, open_store, sample
from escrowmq.store.store import MessageStore


def read_all(store: MessageStore, queues: int, *, copied: bool) -> float:
    """Return bytes per second of reading every queue from its first message to its last."""
    total = 0
    began = time.perf_counter()
    for queue_id in range(queues):
        at, end = 0, store.max_offset(TOPIC, queue_id)
        while at < end:
            results = store.read(TOPIC, queue_id, at, count_max=32)
            total += len(b"".join(results.slices)) if copied else results.size
            at = results.next_offset
    return total / (time.perf_counter() - began)


def copy_all(store: MessageStore) -> float:
    """Return bytes per second of copying the log in pieces of 32 messages."""
    piece = 32 * 1200
    total = 0
    views = [
        store._log.view(base, min(base + (1 << 30), store.end))
        for base in store._log.segment_bases()
    ]
    began = time.perf_counter()
    for view in views:
        for at in range(0, len(view), piece):
            total += len(bytes(view[at : at + piece]))
    return total / (time.perf_counter() - began)


def rows(*, quick: bool, rounds: int) -> list[Row]:
    count = 20_000 if quick else 200_000
    results = []
    for queues in (1, 4):
        with directory() as path:
            store = open_store(path)
            for at in range(0, count, 100):
                records = [sample(number, queues=queues) for number in range(at, at + 100)]
                store.append(records, now_ms=NOW_MS)
            store.checkpoint()
            rate = alternate(
                {
                    "slices": partial(read_all, store, queues, copied=False),
                    "joined": partial(read_all, store, queues, copied=True),
                    "copy": partial(copy_all, store),
                },
                rounds=rounds,
            )
            store.abandon()
        lie = "side by side" if queues == 1 else "between those of three other queues"
        for variant, words in (("slices", "handed out as slices"), ("joined", "and copied")):
            results.append(
                Row(
                    f"read 32 messages that lie {lie}, {words}",
                    f"{rate[variant] / 1e9:.2f} GB/s",
                    f"{rate['copy'] / 1e9:.2f} GB/s, copying",
                    f"{rate[variant] / rate['copy']:.2f}",
                    "1 GB/s or copying / 2",
                )
            )
    return results
