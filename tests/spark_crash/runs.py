"""Runs: who dies where, what came of it, and the table.

A chain of runs is one query: in each of its epochs, but the first and the last, somebody dies.
A row that is lost or doubled belongs to an epoch, and so to a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.brokers import Served
from tests.spark_crash.job import is_taken_over
from tests.spark_crash.points import (
    DIRECTORY,
    DRIVER,
    FROZEN,
    PIDS,
    POINTS,
    READ,
    TASK,
    THAWED,
    armed_file,
    fired_file,
)
from tests.sparks import environment

LOCAL: Final = "local[2,3]"
CLUSTER: Final = "local-cluster[2,1,512]"
WAIT_S: Final = 600.0  # a driver needs ten seconds, on a busy machine minutes
STEP: Final = 200  # rows in an epoch
CHAIN_MAX: Final = 12
RUN_S: Final = 120.0  # of a chain, for each of its runs
QUEUES: Final = 4
TRIES: Final = 3


@dataclass(frozen=True, order=True)
class Case:
    victim: str
    point: str

    @property
    def master(self) -> str:
        return CLUSTER if self.victim == "executor" else LOCAL


def all_cases() -> list[Case]:
    return [
        *(Case("driver", point) for point in POINTS),
        *(Case("worker", point) for point in POINTS),
        *(Case("executor", point) for point in (READ[-1], *TASK)),
        *(Case("broker", point) for point in (*TASK, *DRIVER)),
        *(Case("freeze", point) for point in ("write-parked", "commit-begin", "decide-before")),
    ]


def chosen(count: int, seed: int) -> list[Case]:
    """Every case in turn, in an order that the seed says; those of one master together."""
    cases = all_cases()
    random.Random(seed).shuffle(cases)
    return sorted(itertools.islice(itertools.cycle(cases), count), key=lambda case: case.master)


def chains(cases: Iterable[Case]) -> list[list[Case]]:
    """In their order, as few as can be. Who was frozen finds his query at its end: he is last."""
    made: list[list[Case]] = []
    for case in cases:
        last = made[-1] if made else []
        is_full = len(last) == CHAIN_MAX or (last and last[-1].victim == "freeze")
        if not last or is_full or last[-1].master != case.master:
            made.append([])
        made[-1].append(case)
    return made


@dataclass(frozen=True)
class Outcome:
    case: Case
    fired: bool
    lost: int
    doubled: int
    torn: int  # times that somebody looked and saw a part of an epoch
    said: str
    slow: int = 0  # starts that Spark gave up on, at the first run of a chain

    @property
    def is_good(self) -> bool:
        return self.fired and self.ended_well and not (self.lost or self.doubled or self.torn)

    @property
    def ended_well(self) -> bool:
        """Of a chain: nothing else may have failed in the end than a driver that was frozen."""
        return self.said == "done" or is_taken_over(self.said)


class Job:
    """A driver as a process of its own."""

    def __init__(self, master: str, directory: Path) -> None:
        self.directory = directory
        errors = (directory / "job.err").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark_crash.job", master],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **environment(), DIRECTORY: str(directory)},
            cwd=directory,
        )
        errors.close()
        self._said = b""

    def tell(self, wanted: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, wait_s: float) -> str | None:
        """Its next line; "" if it has died, None if it said nothing in this time."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + wait_s
        while b"\n" not in self._said:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                return None
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                return ""
            self._said += chunk
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        """The JVM dies with the pipe to its Python; it is not asked nicely."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Field:
    """A broker, and a driver for each master that is wanted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._served = Served(directory / "broker", wait_s=120)
        self._job: Job | None = None
        self._master = ""
        self._numbers = itertools.count()

    def __enter__(self) -> Field:
        self._served.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end_driver()
        if self._served.is_alive:
            self._served.kill()

    def run(self, chain: Sequence[Case]) -> list[Outcome]:
        """Once more if somebody was not killed: a busy machine fails Spark before it gets there."""
        for _ in range(TRIES):
            outcomes = self._run(chain)
            if any(one.lost or one.doubled or one.torn for one in outcomes):
                break  # never tried away
            if all(one.fired for one in outcomes):
                break
        return outcomes

    def _run(self, chain: Sequence[Case]) -> list[Outcome]:
        number = next(self._numbers)
        topic = f"crash-{number}"
        with self._served.client() as client:
            client.create_topic(topic, queues=QUEUES)
        job = self._driver(chain[0].master)
        epochs = range(1, len(chain) + 1)
        _arm(job.directory, chain)
        wanted: dict[str, object] = {
            "servers": self._served.namesrv_address,
            "topic": topic,
            "checkpoint": str(self._directory / f"checkpoint-{number}"),
            "count": (len(chain) + 2) * STEP,
            "step": STEP,
        }
        wait_s = WAIT_S + RUN_S * len(chain)
        said, slow, torn = self._finish(chain[0].master, wanted, wait_s)
        fired = [fired_file(job.directory, epoch).exists() for epoch in epochs]
        _arm(job.directory, ())
        found = Counter(int(row) for row in self._rows(topic))
        expected = Counter(range((len(chain) + 2) * STEP))
        lost = Counter(row // STEP for row in (expected - found).elements())
        doubled = Counter(row // STEP for row in (found - expected).elements())
        # The first and the last epoch, and what is torn, are on the account of the first run.
        outcomes = [
            Outcome(case, was, lost.pop(epoch, 0), doubled.pop(epoch, 0), 0, said)
            for epoch, case, was in zip(epochs, chain, fired, strict=True)
        ]
        first = outcomes[0]
        outcomes[0] = replace(
            first,
            lost=first.lost + lost.total(),
            doubled=first.doubled + doubled.total(),
            torn=torn,
            slow=slow,
        )
        return outcomes

    def _finish(
        self, master: str, wanted: dict[str, object], wait_s: float
    ) -> tuple[str, int, int]:
        """Tell the driver, and bring back whoever dies, until it says how it ended."""
        job, torn = self._driver(master), 0
        job.tell(wanted)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            said = job.hear(0.05)
            if said == "":  # the driver died
                job = self._new_driver(master)
                job.tell(wanted)
            elif said is not None:
                answer = json.loads(said)
                return answer["end"], answer["slow"], torn
            if (job.directory / FROZEN).exists() and not (job.directory / THAWED).exists():
                self._take_over(job, wanted)
            if not self._served.is_alive:
                self._restart_broker()
            torn += self._is_torn(str(wanted["topic"]))
        self._end_driver()  # whatever it is at, the next run is not to wait for it
        return f"no end in {wait_s:.0f} s", 0, torn

    def _take_over(self, frozen: Job, wanted: dict[str, object]) -> None:
        """Another driver on the same checkpoint; then the first wakes up, and must not harm."""
        directory = self._directory / "second"
        directory.mkdir(exist_ok=True)
        (directory / PIDS).write_text("{}")
        second = Job(LOCAL, directory)
        try:
            assert second.hear(WAIT_S) == "ready"
            second.tell(wanted)
            said = second.hear(WAIT_S)
            assert said, "the second driver died"
            assert json.loads(said)["end"] == "done", said
        finally:
            second.end()
            (frozen.directory / THAWED).touch()

    def _driver(self, master: str) -> Job:
        if self._job is None or self._master != master:
            return self._new_driver(master)
        return self._job

    def _end_driver(self) -> None:
        if self._job is not None:
            self._job.end()
            self._job = None

    def _new_driver(self, master: str) -> Job:
        self._end_driver()
        directory = self._directory / "job"
        directory.mkdir(exist_ok=True)
        (directory / PIDS).write_text(json.dumps({"broker": [self._served.pid]}))
        self._job, self._master = Job(master, directory), master
        said = self._job.hear(WAIT_S)
        assert said == "ready", f"{said}\n{(directory / 'job.err').read_text()[-3000:]}"
        return self._job

    def _restart_broker(self) -> None:
        self._served.bury()
        self._served.start()
        job = self._job
        assert job is not None
        known = json.loads((job.directory / PIDS).read_text())
        (job.directory / PIDS).write_text(json.dumps({**known, "broker": [self._served.pid]}))

    def _rows(self, topic: str) -> Iterable[str]:
        with self._served.client() as client:
            for queue_id in range(QUEUES):
                yield from (record.body.decode() for record in client.pull_all(topic, queue_id))

    def _is_torn(self, topic: str) -> bool:
        """Whether the topic ends inside an epoch: all queues are asked in one go, so look twice."""
        try:
            with self._served.client() as client:
                before = [client.max_offset(topic, queue) for queue in range(QUEUES)]
                after = [client.max_offset(topic, queue) for queue in range(QUEUES)]
        except OSError:
            return False  # it is being killed
        return before == after and sum(before) % STEP != 0


def _arm(directory: Path, chain: Sequence[Case]) -> None:
    """One for each epoch but the first; whatever was there before goes."""
    for old in (*directory.glob("armed-*"), *directory.glob("fired-*")):
        old.unlink(missing_ok=True)
    for name in (FROZEN, THAWED):
        (directory / name).unlink(missing_ok=True)
    for epoch, case in enumerate(chain, start=1):
        armed = {"point": case.point, "victim": case.victim}
        armed_file(directory, epoch).write_text(json.dumps(armed))


def table(outcomes: Iterable[Outcome]) -> str:
    rows: dict[Case, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.case, []).append(outcome)
    lines = [f"{'killed':10} {'at':18} {'runs':>5} {'lost':>5} {'doubled':>8} {'torn':>5}  remarks"]
    for case, all_of in sorted(rows.items()):
        remarks = {one.said[:300] for one in all_of if not one.ended_well}
        idle = sum(not one.fired for one in all_of)
        if idle:
            remarks.add(f"{idle} never got there: no crash runs")
        lines.append(
            f"{case.victim:10} {case.point:18} {len(all_of):5} {sum(o.lost for o in all_of):5} "
            f"{sum(o.doubled for o in all_of):8} {sum(o.torn for o in all_of):5}  "
            f"{'; '.join(sorted(remarks))}"
        )
    slow = sum(outcome.slow for runs in rows.values() for outcome in runs)
    if slow:
        lines.append(f"{slow} times Spark gave up on a Python process that was too slow to start")
    return "\n".join(lines)
