"""How long a start takes after kill -9 under load: `python -m bench.restart`.

The store: a process appends messages as fast as it can, with the checkpoints that a broker makes
under load, until the log is long enough, and kills itself. Then another process opens the
directory.

The broker: the generator loads `escrowmq serve` until its log is as long, and the broker is killed
while requests are in flight. Its figure is the time from the command that starts it again, with
the start of Python, until a message was accepted. The files are in the page cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from bench.broker import QUEUES
from bench.cpu_time import cpu_s
from bench.generator import Load, LoadFailed, run
from bench.samples import NOW_MS, directory, open_store, sample
from bench.servers import EscrowMQ, client, first_send_s
from escrowmq.remoting.bodies_admin import RuntimeTable
from escrowmq.remoting.codes import RequestCode
from escrowmq.server.tasks import CHECKPOINT_BACKLOG_BYTES
from tests.interop.remoting import Client

BATCH = 64  # messages per turn
ENDLESS_S = 3600.0  # longer than the load takes, also on a busy machine: the kill ends it
LOADS = tuple(
    Load(mode, connections=64, seconds=ENDLESS_S, warm_up_s=0, body_bytes=body_bytes)
    for mode, body_bytes in (("send", 100), ("send", 1024), ("tx", 1024))
)
POLL_S = 0.01
RECORDS_READ = re.compile(r"records_read=(\d+)")  # in the log of a start


def load_and_die(path: Path, total_bytes: int, body_bytes: int) -> None:
    """Append until the log is long enough, with checkpoints in a thread, and die without a word."""
    store = open_store(path)
    number, running = 0, None
    while store.end < total_bytes or running is None:
        batch = [sample(n, body_bytes=body_bytes) for n in range(number, number + BATCH)]
        store.append(batch, now_ms=NOW_MS + number // 100)
        number += BATCH
        if running is not None and not running[1].is_alive():
            store.finish_checkpoint(running[0])
            running = None
        if running is None and store.end - store.checkpointed_offset >= CHECKPOINT_BACKLOG_BYTES:
            job = store.begin_checkpoint()
            running = job, threading.Thread(target=job.run, daemon=True)
            running[1].start()
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_report(path: Path) -> None:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    store = open_store(path)
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    read_bytes = store.recovery.end - store.recovery.scanned_from
    sys.stdout.write(
        f"store: log {store.end / (1 << 30):.2f} GiB, {store.recovery.records:,} records in "
        f"{read_bytes / (1 << 20):.0f} MiB behind the checkpoint: ready after {took_s:.2f} s "
        f"(processor time {cpu_s:.2f} s)\n"
    )
    store.abandon()


def start_broker(path: Path, total_bytes: int, load: Load) -> None:
    """Report how long a broker takes to start that was killed under this load."""
    server = EscrowMQ(path, {})
    server.start()
    try:
        with client(server) as admin:
            admin.create_topic(load.topic, queues=QUEUES)
        load_and_kill(server, load, total_bytes)
        took_s = first_send_s(server)
        used_s = cpu_s(*server.pids)
        with client(server) as admin:
            log_gib = log_end(admin) / (1 << 30)
        read = records_read(server)
    finally:
        server.kill()
    sys.stdout.write(
        f"broker, {load.mode} of {load.body_bytes} bytes: log {log_gib:.2f} GiB, "
        f"{read:,} records behind the checkpoint, first message accepted after {took_s:.2f} s "
        f"(processor time {used_s:.2f} s)\n"
    )


def load_and_kill(server: EscrowMQ, load: Load, end: int) -> None:
    """Load a broker until its log has reached this offset, and kill it."""
    loading = threading.Thread(target=_load_until_killed, args=(server, load))
    loading.start()
    try:
        with client(server) as admin:
            while log_end(admin) < end:
                if not loading.is_alive():
                    raise RuntimeError("the generator ended before the log was long enough")
                time.sleep(POLL_S)
    finally:
        server.kill()
        loading.join()


def records_read(server: EscrowMQ) -> int:
    """Return how many records behind the checkpoint the last start has read."""
    return int(RECORDS_READ.findall((server.directory / "serve.out").read_text())[-1])


def log_end(admin: Client) -> int:
    body = admin.expect(RequestCode.GET_BROKER_RUNTIME_INFO).body
    return int(msgspec.json.decode(body, type=RuntimeTable).table["commitLogMaxOffset"])


def _load_until_killed(server: EscrowMQ, load: Load) -> None:
    with contextlib.suppress(LoadFailed):  # the generator fails when the broker is killed
        run(load, server.ports, server.pids)


def main() -> None:
    total_bytes = int(os.environ.get("MEBIBYTES", "1024")) << 20
    with directory() as path:
        for body_bytes in (100, 1024):
            store = str(path / f"store-{body_bytes}")
            _run("load", store, str(total_bytes), str(body_bytes))
            _run("open", store)
        for load in LOADS:
            start_broker(path / f"broker-{load.mode}-{load.body_bytes}", total_bytes, load)


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "bench.restart", *arguments], check=False)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["load", path, total_bytes, body_bytes]:
            load_and_die(Path(path), int(total_bytes), int(body_bytes))
        case ["open", path]:
            open_and_report(Path(path))
        case _:
            main()
