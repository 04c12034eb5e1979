"""How long a broker needs to be ready after kill -9 under load: `python -m bench.restart`.

A process appends small messages as fast as it can, with the checkpoints that a broker makes under
load, until the log is long enough, and kills itself. Then another process opens the directory. The
figures are for the store; a broker adds the start of Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.samples import NOW_MS, open_store, sample
from escrowmq.server.tasks import CHECKPOINT_BACKLOG_BYTES

BATCH = 64  # messages per turn


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
        f"log {store.end / (1 << 30):.2f} GiB, {store.recovery.records:,} records in "
        f"{read_bytes / (1 << 20):.0f} MiB behind the checkpoint: ready after {took_s:.2f} s "
        f"(processor time {cpu_s:.2f} s)\n"
    )
    store.abandon()


def main() -> None:
    total_bytes = int(os.environ.get("MEBIBYTES", "1024")) << 20
    with tempfile.TemporaryDirectory() as directory:
        for body_bytes in (100, 1024):
            path = os.path.join(directory, str(body_bytes))
            _run("load", path, str(total_bytes), str(body_bytes))
            _run("open", path)


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
