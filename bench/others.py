"""The latency of a well-behaved client: one send after the other."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.servers import EscrowMQ, client

TOPIC = "bench-others"


@dataclass(frozen=True)
class Latency:
    p50_ms: float
    p99_ms: float
    count: int

    def __str__(self) -> str:
        return f"{self.p50_ms:.2f} / {self.p99_ms:.2f} ms"


def latency_of_others(server: EscrowMQ, seconds: float, *, pause_s: float = 0.0) -> Latency:
    taken: list[float] = []
    with client(server, timeout_s=60) as sender:
        for _ in range(50):  # warm-up
            sender.send(TOPIC, b"x" * 200)
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            sender.send(TOPIC, b"x" * 200)
            taken.append((time.perf_counter() - began) * 1000)
            if pause_s:
                time.sleep(pause_s)
    taken.sort()
    return Latency(statistics.median(taken), taken[int(len(taken) * 0.99)], len(taken))


def own_mib(server: EscrowMQ) -> float:
    """Return resident memory without mapped files."""
    status = Path(f"/proc/{server.pids[0]}/status").read_text()
    [kib] = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
    return int(kib) / 1024
