"""Run the cases: start broker and driver, restart what is killed, and count the rows at the end."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.spark_crash.cases import Case, Outcome
from tests.spark_crash.drivers import START_TIMEOUT_S, Drivers
from tests.spark_crash.points import (
    BROKER_PID,
    FROZEN,
    THAWED,
    armed_file,
    fired_file,
    write_pids,
)
from tests.support.brokers import Server

STEP: Final = 200  # rows in an epoch
RUN_TIMEOUT_S: Final = 120.0  # for each run of a chain
QUEUES: Final = 4
ATTEMPTS_MAX: Final = 3
NEEDS_ANOTHER_DRIVER: Final = ("driver", "freeze")


@dataclass
class Observations:
    """What was observed while a chain ran."""

    query_result: str = ""
    ends: Counter[str] = field(default_factory=Counter)  # ended processes by victim
    torn: Counter[int] = field(default_factory=Counter)  # by epoch


class CrashHarness:
    """A broker, and drivers for the master of each case.

    `is_foreach_batch`: write with `foreach_batch_writer` instead of the stream's own sink.
    """

    def __init__(self, directory: Path, *, is_foreach_batch: bool = False) -> None:
        self._directory = directory
        self._is_foreach_batch = is_foreach_batch
        self._served = Server(directory / "broker", wait_s=120)
        self._shared = directory / "job"
        self._shared.mkdir()
        self.drivers = Drivers(self._shared)
        self._numbers = itertools.count()
        self.query_starts: Counter[str] = Counter()  # "all", and "slow" for those that failed

    def __enter__(self) -> CrashHarness:
        self._served.start()
        write_pids(self._shared / BROKER_PID, self._served.pid)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drivers.kill_all()
        if self._served.is_alive:
            self._served.kill()

    def run(self, chain: Sequence[Case]) -> list[Outcome]:
        """Run a chain, and again those cases whose victim was not killed.

        On a busy machine Spark may fail before it reaches a point. Returns every attempt.
        """
        outcomes: list[Outcome] = []
        for _ in range(ATTEMPTS_MAX):
            outcomes += self._run(chain)
            chain = [outcome.case for outcome in outcomes[-len(chain) :] if not outcome.fired]
            if not chain:
                break
        return outcomes

    def _run(self, chain: Sequence[Case]) -> list[Outcome]:
        number = next(self._numbers)
        topic = f"crash-{number}"
        with self._served.client() as client:
            client.create_topic(topic, queues=QUEUES)
        _arm(self._shared, chain)
        count = (len(chain) + 2) * STEP
        query: dict[str, object] = {
            "servers": self._served.namesrv_address,
            "topic": topic,
            "checkpoint": str(self._directory / f"checkpoint-{number}"),
            "count": count,
            "step": STEP,
            "is_foreach_batch": self._is_foreach_batch,
        }
        observations = self._observe(chain, query, START_TIMEOUT_S + RUN_TIMEOUT_S * len(chain))
        fired = [fired_file(self._shared, epoch).exists() for epoch, _ in enumerate(chain, start=1)]
        _arm(self._shared, ())
        stored = Counter(int(row) for row in self._rows(topic))
        expected = Counter(range(count))
        lost = Counter(row // STEP for row in (expected - stored).elements())
        doubled = Counter(row // STEP for row in (stored - expected).elements())
        return outcomes_of(chain, fired, lost, doubled, observations)

    def _observe(
        self, chain: Sequence[Case], query: dict[str, object], timeout_s: float
    ) -> Observations:
        """Run the query, and restart every process that ends, until the query is complete."""
        observations = Observations()
        remaining_drivers = sum(case.victim in NEEDS_ANOTHER_DRIVER for case in chain)
        driver = self.drivers.current(chain[0].master, needs_spare=remaining_drivers > 0)
        driver.run(query)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            line = driver.read_line(0.05)
            if line == "":
                observations.ends["driver"] += 1
                self.drivers.discard_current()
                remaining_drivers -= 1
                driver = self.drivers.current(chain[0].master, needs_spare=remaining_drivers > 0)
                driver.run(query)
            elif line is not None:
                report = json.loads(line)
                observations.query_result = report["result"]
                self.query_starts.update(all=report["starts"], slow=report["slow"])
                return observations
            if _is_frozen(self._shared):
                self._complete_with_second_driver(query)
                observations.ends["freeze"] += 1
            if not self._served.is_alive:
                self._restart_broker()
                observations.ends["broker"] += 1
            self._look_for_torn_epoch(str(query["topic"]), observations)
        self.drivers.kill_all()  # the next run must not wait for this query
        observations.query_result = f"not complete after {timeout_s:.0f} s"
        return observations

    def _complete_with_second_driver(self, query: dict[str, object]) -> None:
        """Run the query with another driver on the same checkpoint, then wake the frozen one.

        The frozen driver must not write anything more.
        """
        try:
            second = self.drivers.second()
            second.run(query)
            line = second.read_line(START_TIMEOUT_S)
            assert line, "the second driver has ended"
            assert json.loads(line)["result"] == "done", line
        finally:
            (self._shared / THAWED).touch()

    def _restart_broker(self) -> None:
        self._served.reap_killed()
        self._served.start()
        write_pids(self._shared / BROKER_PID, self._served.pid)

    def _rows(self, topic: str) -> Iterable[str]:
        with self._served.client() as client:
            for queue_id in range(QUEUES):
                yield from (record.body.decode() for record in client.pull_all(topic, queue_id))

    def _look_for_torn_epoch(self, topic: str, observations: Observations) -> None:
        """Observe whether the topic ends within an epoch.

        The queues are queried one after the other, so the offsets count only if they stay the same.
        """
        try:
            with self._served.client() as client:
                before = [client.max_offset(topic, queue) for queue in range(QUEUES)]
                after = [client.max_offset(topic, queue) for queue in range(QUEUES)]
        except OSError:
            return  # the broker was just killed
        epoch, rows_of_part = divmod(sum(before), STEP)
        if before == after and rows_of_part:
            observations.torn[epoch] += 1


def _is_frozen(directory: Path) -> bool:
    return (directory / FROZEN).exists() and not (directory / THAWED).exists()


def outcomes_of(
    chain: Sequence[Case],
    fired: Sequence[bool],
    lost: Counter[int],
    doubled: Counter[int],
    observations: Observations,
) -> list[Outcome]:
    """Return the outcome of each case of a chain.

    The first and the last epoch, which have no case, count for the first and the last case.
    """
    last = len(chain)
    for counts in (lost, doubled, observations.torn):
        counts[1] += counts.pop(0, 0)
        counts[last] += sum(counts.pop(epoch) for epoch in list(counts) if epoch > last)
    kills = Counter(case.victim for case, has_fired in zip(chain, fired, strict=True) if has_fired)
    # If fewer processes ended than were killed, none of these cases counts as fired.
    uncertain_victims = {
        victim
        for victim in ("driver", "broker", "freeze")
        if observations.ends[victim] != kills[victim]
    }
    return [
        Outcome(
            case,
            has_fired and case.victim not in uncertain_victims,
            *(lost[epoch], doubled[epoch], observations.torn[epoch]),
            observations.query_result,
        )
        for epoch, (case, has_fired) in enumerate(zip(chain, fired, strict=True), start=1)
    ]


def _arm(directory: Path, chain: Sequence[Case]) -> None:
    """Arm one case for each epoch except the first, and delete the files of earlier runs."""
    for old in (*directory.glob("armed-*"), *directory.glob("fired-*")):
        old.unlink(missing_ok=True)
    for name in (FROZEN, THAWED):
        (directory / name).unlink(missing_ok=True)
    for epoch, case in enumerate(chain, start=1):
        armed = {"point": case.point, "victim": case.victim}
        armed_file(directory, epoch).write_text(json.dumps(armed))
