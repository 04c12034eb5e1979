"""Time of a start with 40,000 queues, after a clean stop and after kill -9, and memory per queue.

    python -m bench.many_queues [QUEUES]

Each queue has a message in a file of the default length. Every start is a process of its own, and
the pages of the files are in the page cache, as after a restart of the broker alone. First come
starts of the store, then starts of `escrowmq serve`: from the command to the first accepted
message. It is killed while the generator sends to all topics in turn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.cpu_time import cpu_s
from bench.generator import Load
from bench.restart import ENDLESS_S, load_and_kill, log_end, records_read
from bench.samples import NOW_MS, directory
from bench.servers import EscrowMQ, client, first_send_s, lay_topics
from bench.store_open import anonymous_bytes
from escrowmq.config import StoreConfig
from escrowmq.message.keys import encode_host
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore

TOPIC = "topic-"  # and its number
QUEUES_PER_TOPIC = 8
LOADED_BYTES = 16 << 20  # sent to the broker before it is killed
HOST = encode_host("127.0.0.1", 10911)


def record(number: int) -> NewRecord:
    return NewRecord(
        topic=f"{TOPIC}{number // QUEUES_PER_TOPIC}",
        queue_id=number % QUEUES_PER_TOPIC,
        body=b"x" * 100,
        properties=b"UNIQ_KEY\x01U%d\x02" % number,
        born_ms=NOW_MS,
        born_host=HOST,
    )


def open_store(path: Path) -> MessageStore:
    return MessageStore.open(RealDisk(path), StoreConfig(), store_host=HOST)


def fill(path: Path, queues: int) -> None:
    """Give every queue a message, and stop cleanly. Nothing is made durable: that takes minutes."""
    os.fsync = os.fdatasync = lambda descriptor: None  # type: ignore[assignment]  # a process of its own
    store = open_store(path)
    for begin in range(0, queues, 1000):
        numbers = range(begin, min(begin + 1000, queues))
        store.append([record(number) for number in numbers], now_ms=NOW_MS)
    store.close()


def append_and_die(path: Path) -> None:
    """Send a message to one queue of 400 after the last checkpoint."""
    store = open_store(path)
    queues = len(store.queues())
    store.append([record(number) for number in range(0, queues, 400)], now_ms=NOW_MS)
    os.kill(os.getpid(), signal.SIGKILL)


def start(path: Path) -> None:
    before = anonymous_bytes()
    began = time.perf_counter()
    store = open_store(path)
    took_s = time.perf_counter() - began
    used = anonymous_bytes() - before
    began = time.perf_counter()
    store.begin_checkpoint()
    checkpoint_s = time.perf_counter() - began
    queues = len(store.queues())
    figures = {"took_s": took_s, "bytes_per_queue": used / queues, "checkpoint_s": checkpoint_s}
    print(json.dumps({"queues": queues, **figures}))
    store.abandon()


def run(step: str, path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "bench.many_queues", step, str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def start_store(queues: int) -> None:
    with directory() as path:
        run("fill", path, str(queues))
        for what in ("clean stop", "kill -9"):
            # The start before leaves the directory like a process that was killed.
            clean = open_store(path)
            clean.close()
            if what == "kill -9":
                run("append-and-die", path)
            figures = json.loads(run("start", path))
            print(
                f"{figures['queues']} queues, start after {what}: {figures['took_s']:.2f} s, "
                f"{figures['bytes_per_queue']:.0f} bytes of memory per queue; to begin the next "
                f"checkpoint takes {figures['checkpoint_s'] * 1000:.1f} ms"
            )


def start_broker(queues: int) -> None:
    topics = queues // QUEUES_PER_TOPIC
    with directory() as path:
        server = EscrowMQ(path, {})
        run("fill", server.data, str(queues))
        lay_topics(server.data, [f"{TOPIC}{n}" for n in range(topics)], queues=QUEUES_PER_TOPIC)
        try:
            report_start(server, queues, "clean stop")
            load = Load(
                "send",
                connections=64,
                seconds=ENDLESS_S,
                warm_up_s=0,
                topic=TOPIC,
                topics=topics,
                queues=QUEUES_PER_TOPIC,
            )
            with client(server) as admin:
                load_and_kill(server, load, log_end(admin) + LOADED_BYTES)
            report_start(server, queues, "kill -9")
        finally:
            server.kill()


def report_start(server: EscrowMQ, queues: int, what: str) -> None:
    took_s = first_send_s(server)
    print(
        f"broker with {queues} queues, first message accepted after {what}: {took_s:.2f} s "
        f"(processor time {cpu_s(*server.pids):.2f} s), "
        f"{records_read(server):,} records behind the checkpoint"
    )


def main(queues: int) -> None:
    start_store(queues)
    start_broker(queues)


if __name__ == "__main__":
    if sys.argv[1:2] == ["start"]:
        start(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["fill"]:
        fill(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["append-and-die"]:
        append_and_die(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40_000)
