"""Runs: a broker, a driver, whoever dies is brought back, and rows are counted in the end."""

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
from tests.spark_crash.drivers import WAIT_S, Drivers
from tests.spark_crash.points import (
    BROKER_PID,
    FROZEN,
    THAWED,
    armed_file,
    fired_file,
    note_pids,
)
from tests.support.brokers import Server

STEP: Final = 200  # rows in an epoch
RUN_S: Final = 120.0  # of a chain, for each of its runs
QUEUES: Final = 4
TRIES: Final = 3
NEEDS_ANOTHER_DRIVER: Final = ("driver", "freeze")


@dataclass
class Watched:
    """What was seen of a chain while it ran."""

    said: str = ""
    deaths: Counter[str] = field(default_factory=Counter)  # by victim
    torn: Counter[int] = field(default_factory=Counter)  # by epoch


class Field:
    """A broker, and a driver for the master that is wanted."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._served = Server(directory / "broker", wait_s=120)
        self._shared = directory / "job"
        self._shared.mkdir()
        self.drivers = Drivers(self._shared)
        self._numbers = itertools.count()
        self.counted: Counter[str] = Counter()

    def __enter__(self) -> Field:
        self._served.start()
        note_pids(self._shared / BROKER_PID, self._served.pid)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.drivers.end()
        if self._served.is_alive:
            self._served.kill()

    def run(self, chain: Sequence[Case]) -> list[Outcome]:
        """Whoever was not killed gets another chance: a busy machine may fail Spark before it gets
        there. Every try is in the answer."""
        outcomes: list[Outcome] = []
        for _ in range(TRIES):
            outcomes += self._run(chain)
            chain = [one.case for one in outcomes[-len(chain) :] if not one.fired]
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
        wanted: dict[str, object] = {
            "servers": self._served.namesrv_address,
            "topic": topic,
            "checkpoint": str(self._directory / f"checkpoint-{number}"),
            "count": count,
            "step": STEP,
        }
        seen = self._watch(chain, wanted, WAIT_S + RUN_S * len(chain))
        fired = [fired_file(self._shared, epoch).exists() for epoch, _ in enumerate(chain, start=1)]
        _arm(self._shared, ())
        found = Counter(int(row) for row in self._rows(topic))
        expected = Counter(range(count))
        lost = Counter(row // STEP for row in (expected - found).elements())
        doubled = Counter(row // STEP for row in (found - expected).elements())
        return outcomes_of(chain, fired, lost, doubled, seen)

    def _watch(self, chain: Sequence[Case], wanted: dict[str, object], wait_s: float) -> Watched:
        """Tell the driver, and bring back whoever dies, until it says how it ended."""
        seen = Watched()
        drivers_to_come = sum(case.victim in NEEDS_ANOTHER_DRIVER for case in chain)
        job = self.drivers.take(chain[0].master, drivers_to_come)
        job.tell(wanted)
        deadline_s = time.monotonic() + wait_s
        while time.monotonic() < deadline_s:
            answer = job.hear(0.05)
            if answer == "":
                seen.deaths["driver"] += 1
                self.drivers.bury()
                drivers_to_come -= 1
                job = self.drivers.take(chain[0].master, drivers_to_come)
                job.tell(wanted)
            elif answer is not None:
                told = json.loads(answer)
                seen.said = told["end"]
                self.counted.update(starts=told["starts"], slow=told["slow"])
                return seen
            if _is_frozen(self._shared):
                self._take_over(wanted)
                seen.deaths["freeze"] += 1
            if not self._served.is_alive:
                self._restart_broker()
                seen.deaths["broker"] += 1
            self._look(str(wanted["topic"]), seen)
        self.drivers.end()  # whatever it is at, the next run is not to wait for it
        seen.said = f"no end in {wait_s:.0f} s"
        return seen

    def _take_over(self, wanted: dict[str, object]) -> None:
        """Another driver on the same checkpoint; then the first wakes up, and must not harm."""
        try:
            second = self.drivers.second()
            second.tell(wanted)
            answer = second.hear(WAIT_S)
            assert answer, "the second driver died"
            assert json.loads(answer)["end"] == "done", answer
        finally:
            (self._shared / THAWED).touch()

    def _restart_broker(self) -> None:
        self._served.reap_killed()
        self._served.start()
        note_pids(self._shared / BROKER_PID, self._served.pid)

    def _rows(self, topic: str) -> Iterable[str]:
        with self._served.client() as client:
            for queue_id in range(QUEUES):
                yield from (record.body.decode() for record in client.pull_all(topic, queue_id))

    def _look(self, topic: str, seen: Watched) -> None:
        """Whether the topic ends inside an epoch: all queues are asked in one go, so look twice."""
        try:
            with self._served.client() as client:
                before = [client.max_offset(topic, queue) for queue in range(QUEUES)]
                after = [client.max_offset(topic, queue) for queue in range(QUEUES)]
        except OSError:
            return  # it is being killed
        epoch, part = divmod(sum(before), STEP)
        if before == after and part:
            seen.torn[epoch] += 1


def _is_frozen(directory: Path) -> bool:
    return (directory / FROZEN).exists() and not (directory / THAWED).exists()


def outcomes_of(
    chain: Sequence[Case],
    fired: Sequence[bool],
    lost: Counter[int],
    doubled: Counter[int],
    seen: Watched,
) -> list[Outcome]:
    """The first and the last epoch are on the account of the first run and of the last."""
    last = len(chain)
    for counts in (lost, doubled, seen.torn):
        counts[1] += counts.pop(0, 0)
        counts[last] += sum(counts.pop(epoch) for epoch in list(counts) if epoch > last)
    said = Counter(case.victim for case, was in zip(chain, fired, strict=True) if was)
    unseen = {
        victim
        for victim in ("driver", "broker", "freeze")
        if seen.deaths[victim] != said[victim]  # a shot that missed proves nothing
    }
    return [
        Outcome(
            case,
            was and case.victim not in unseen,
            *(lost[epoch], doubled[epoch], seen.torn[epoch]),
            seen.said,
        )
        for epoch, (case, was) in enumerate(zip(chain, fired, strict=True), start=1)
    ]


def _arm(directory: Path, chain: Sequence[Case]) -> None:
    """One for each epoch but the first; whatever was there before goes."""
    for old in (*directory.glob("armed-*"), *directory.glob("fired-*")):
        old.unlink(missing_ok=True)
    for name in (FROZEN, THAWED):
        (directory / name).unlink(missing_ok=True)
    for epoch, case in enumerate(chain, start=1):
        armed = {"point": case.point, "victim": case.victim}
        armed_file(directory, epoch).write_text(json.dumps(armed))
