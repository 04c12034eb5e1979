"""Time and memory of a start after kill -9. Each start is a separate process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from bench.measure import Row, alternate
from bench.samples import NOW_MS, directory, open_store, sample

TAIL = 20_000  # records after the last checkpoint: some tenths of a second of full load


def fill(path: Path, total_bytes: int, body_bytes: int) -> None:
    """Write a log of that length with checkpoints, and stop cleanly."""
    store = open_store(path)
    number = 0
    while store.end < total_bytes:
        batch = [sample(n, body_bytes=body_bytes) for n in range(number, number + 500)]
        store.append(batch, now_ms=NOW_MS + number // 100)
        number += 500
        if number % 100_000 == 0:
            store.checkpoint()
    store.close()


def append_and_die(path: Path) -> None:
    store = open_store(path)
    for at in range(0, TAIL, 100):
        store.append([sample(at + n) for n in range(100)], now_ms=NOW_MS)
    os.kill(os.getpid(), signal.SIGKILL)


def open_and_tell(path: Path) -> None:
    before = anonymous_bytes()
    began = time.perf_counter()
    store = open_store(path)
    took_s = time.perf_counter() - began
    report = {
        "took_s": took_s,
        "walked": store.recovery.records,
        "memory_bytes": anonymous_bytes() - before,
    }
    print(json.dumps(report))
    store.abandon()


def anonymous_bytes() -> int:
    """Return resident memory without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell RssAnon")


def child(command: str, path: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "bench.store_open", command, str(path), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def opened(path: Path) -> dict[str, float]:
    done = child("open", path)
    assert done.returncode == 0, done.stderr
    report: dict[str, float] = json.loads(done.stdout)
    return report


def after_kill(path: Path) -> float:
    assert child("die", path).returncode == -signal.SIGKILL
    return opened(path)["took_s"]


def rebuilt(path: Path) -> float:
    for name in ("consumequeue", "index"):
        shutil.rmtree(path / name)
    (path / "escrowmq.checkpoint").unlink()
    return opened(path)["took_s"]


def rows(*, quick: bool, rounds: int) -> list[Row]:
    results = []
    megabytes = (16, 64) if quick else (64, 256, 1024)
    for size in megabytes:
        with directory() as path:
            assert child("fill", path, size << 20, 1024).returncode == 0
            took = alternate(
                {"kill": partial(after_kill, path), "rebuild": partial(rebuilt, path)},
                rounds=min(rounds, 3),
            )
        results.append(
            Row(
                f"open a log of {size} MiB after kill -9, {TAIL:,} records behind the checkpoint",
                f"{took['kill']:.2f} s",
                f"{took['rebuild']:.2f} s, everything rebuilt from the log",
                f"{took['kill'] / took['rebuild']:.2f}",
                "2 s" if size == 1024 else "",
            )
        )
    size = 256 if quick else 10 * 1024
    with directory() as path:
        assert child("fill", path, size << 20, 4096).returncode == 0
        report = opened(path)
    results.append(
        Row(
            f"open a directory of {size / 1024:g} GiB: memory that is not mapped files",
            f"{report['memory_bytes'] / (1 << 20):.0f} MiB",
            f"{report['took_s']:.2f} s",
            "",
            "100 MiB",
        )
    )
    return results


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fill", path, total_bytes, body_bytes]:
            fill(Path(path), int(total_bytes), int(body_bytes))
        case ["die", path]:
            append_and_die(Path(path))
        case ["open", path]:
            open_and_tell(Path(path))
