"""How long a test waits for its broker: `python -m bench.testing_kit`.

Each round is a new Python process, as a run of tests is. Its first figures contain the import of
the broker; the others are what further tests pay. On a busy machine, compare the CPU time: it is
what the start takes when nothing else runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROUNDS = 7
LABELS = {
    "first start": "the fixture: import, and start in a thread",
    "first start, CPU": "the same, CPU time",
    "start": "start in a thread again",
    "kill and start": "kill and start again, with the same files",
    "deliver": "send a message and assert that it was delivered",
    "stop": "stop, and remove the files",
    "process": "start in a process of its own",
}


def measure(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def run_round() -> dict[str, float]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    from escrowmq.testing import LocalBroker

    first = LocalBroker()
    first.start()
    figures = {
        "first start": time.perf_counter() - began_s,
        "first start, CPU": time.process_time() - began_cpu_s,
    }
    from escrowmq import Message, blocking

    first.close()
    broker = LocalBroker()
    figures["start"] = measure(broker.start)
    with blocking.Producer(broker.servers, group="bench") as producer:
        producer.send(Message("first", b"1"))  # connects

        def deliver() -> None:
            producer.send(Message("bench", b"1"))
            broker.assert_delivered("bench", [b"1"])

        figures["deliver"] = measure(deliver)

    def kill_and_start() -> None:
        broker.kill()
        broker.start()

    figures["kill and start"] = measure(kill_and_start)
    figures["stop"] = measure(broker.close)
    process = LocalBroker(in_process=False)
    figures["process"] = measure(process.start)
    process.close()
    return figures


def main() -> None:
    command = [sys.executable, "-m", "bench.testing_kit", "round"]
    with tempfile.TemporaryDirectory() as bytecode:
        # Whoever has installed the package has its bytecode too.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        outputs = [subprocess.check_output(command, env=environment) for _ in range(1 + ROUNDS)]
    rounds = [json.loads(output) for output in outputs[1:]]  # the first one compiles
    for name, label in LABELS.items():
        times_s = sorted(figures[name] for figures in rounds)
        median_s, longest_s = statistics.median(times_s), times_s[-1]
        print(f"{label}: {median_s:.3f} s (longest of {ROUNDS}: {longest_s:.3f} s)")


if __name__ == "__main__":
    if sys.argv[1:] == ["round"]:
        print(json.dumps(run_round()))
    else:
        main()
