"""Run RocketMQ's transaction benchmark against our broker, which is killed in the meantime.

Each message of the benchmark contains its plan: one byte with the verdict of its local transaction,
and twenty bytes with the verdicts of its checks. So the log itself says how each half has to end,
and the tests compare that with the delivered messages.

The benchmark reports a check of a half that it has decided as unexpected. It sends ends one way: an
end that is in flight when the broker is killed is lost, and its half must be checked. The benchmark
also reports duplicate checks, but 5.5.0 never finds any, because it does not fill the map that it
searches. The journal in our log has every check that was sent.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from escrowmq.escrow.records import decode_journal_entry
from escrowmq.message import names
from escrowmq.message.properties import decode_properties
from tests.interop import jars
from tests.interop.apache import FAST_START, ChildProcess
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.remoting import HALF_TOPIC, OP_TOPIC, Client
from tests.interop.samples import now_ms
from tests.interop.skipping import call_or_skip
from tests.interop.stores import open_store, settings_of
from tests.support.stores import assert_clean
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.apache, pytest.mark.slow]
log = logging.getLogger(__name__)  # shown with `-o log_cli=true --log-level=info`

TOPIC, QUEUES = "transfers", 4
SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 64 << 20,
    "flushDiskType": "SYNC_FLUSH",
    "transactionTimeOut": 3_000,
    "transactionCheckInterval": 1_000,
}
THREADS = 8
TIMEOUT_S = 60.0
IN_FLIGHT_MS = 2_000  # time in which an end may have been lost by a kill
COMMITTED, ROLLED_BACK, UNDECIDED = range(3)  # the order of Java's LocalTransactionState
PLAN = slice(16, 16 + 1 + 20)  # after batch and number


class Benchmark:
    """TransactionProducer of RocketMQ's examples, which sends until it is killed."""

    def __init__(
        self, namesrv: str, directory: Path, *, batch: int, threads: int, pause_ms: int
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._output = directory / "benchmark.out"
        rates = {"-su": 0.2, "-sr": 0.1, "-cu": 0.2, "-cr": 0.1}
        options = {"-n": namesrv, "-t": TOPIC, "-w": threads, "-s": 512, "-i": pause_ms}
        command = [
            *("java", *FAST_START, "-Xmx256m", f"-Duser.home={directory}"),
            *("-cp", f"{jars.fetch('5.5.0')}/*"),
            "org.apache.rocketmq.example.benchmark.TransactionProducer",
            *(str(part) for option in {**options, **rates}.items() for part in option),
            *("-b", str(batch), "-ri", "1000"),
        ]
        self._process = ChildProcess(command, name="benchmark", output=self._output)

    def kill(self) -> None:
        self._process.kill()

    @property
    def unexpected_checks(self) -> list[str]:
        return [line for line in self._lines() if "unexpected check" in line]

    def highest_count(self, name: str) -> int:
        """Return the highest count with this name in the reports, each of which covers 10 s."""
        counts = re.findall(rf"\b{name}: +(\d+)", "\n".join(self._lines()))
        return max(map(int, counts), default=0)

    def _lines(self) -> list[str]:
        return self._output.read_text(errors="replace").splitlines()


@dataclass
class LogContents:
    """The contents of our log after a run. A half has a unique key and a queue offset."""

    plans: dict[str, list[int]] = field(default_factory=dict)  # by unique key
    parked: Counter[str] = field(default_factory=Counter)  # by unique key
    # By queue offset of the half and number of the check, which starts at 1.
    checks: Counter[tuple[int, int]] = field(default_factory=Counter)
    keys: dict[int, str] = field(default_factory=dict)  # unique key by queue offset
    # Time of each check, and as number 0 the time when the half was parked.
    times_ms: dict[tuple[int, int], int] = field(default_factory=dict)
    stranded: int = 0

    def committed(self) -> set[str]:
        return {key for key, plan in self.plans.items() if final_verdict(plan) == COMMITTED}

    def left_open(self) -> set[str]:
        """Return the halves that only a check can decide."""
        return {key for key, plan in self.plans.items() if plan[0] == UNDECIDED}

    def needless_checks(self) -> list[tuple[int, int]]:
        """Return the checks of halves that the producer had already decided."""
        return [
            (half, number)
            for half, number in self.checks
            if any(verdict != UNDECIDED for verdict in self.plans[self.keys[half]][:number])
        ]


def final_verdict(plan: list[int]) -> int:
    return next(verdict for verdict in plan if verdict != UNDECIDED)


def read_log(directory: Path) -> LogContents:
    contents = LogContents()
    store = open_store(directory, settings_of(SETTINGS))
    try:
        for record in store.records():
            if record.topic == HALF_TOPIC:
                key = decode_properties(record.properties)["UNIQ_KEY"]
                contents.parked[key] += 1
                contents.keys[record.queue_offset] = key
                contents.times_ms[record.queue_offset, 0] = record.stored_ms
                contents.plans[key] = list(bytes(record.body)[PLAN])
            elif record.topic == names.JOURNAL_TOPIC:
                entry = decode_journal_entry(record)
                if entry.event == "asked":
                    contents.checks[entry.half_offset, entry.check_number] += 1
                    contents.times_ms[entry.half_offset, entry.check_number] = record.stored_ms
            elif record.topic == names.STRANDED_TOPIC:
                contents.stranded += 1
    finally:
        store.close()
    return contents


@dataclass
class BenchmarkRun:
    """The result of a run. The second benchmark only responds to the remaining checks."""

    log: LogContents
    delivered: Counter[str]
    sending: Benchmark
    draining: Benchmark
    kills_ms: list[int]  # when the broker or the sending benchmark was killed

    def __str__(self) -> str:
        contents = self.log
        checked_halves = {half for half, _ in contents.checks}
        unexpected_count = len(self.sending.unexpected_checks + self.draining.unexpected_checks)
        return (
            f"{len(contents.plans)} halves, {sum(self.delivered.values())} delivered,"
            f" {sum(contents.checks.values())} checks of {len(checked_halves)} halves,"
            f" {len(contents.needless_checks())} of them needless,"
            f" {unexpected_count} reported as unexpected,"
            f" up to {self.sending.highest_count('Send Failed')} failed sends in ten seconds"
        )


def run_benchmark(directory: Path, *, kills: int, pause_s: tuple[float, float]) -> BenchmarkRun:
    """Run the benchmark and kill the broker `kills` times, after pauses between two limits."""
    call_or_skip("RocketMQ 5.5.0", lambda: jars.fetch("5.5.0"))
    generator = random.Random(kills)
    kills_ms = []
    batch = now_ms()
    with EscrowMQ(directory / "ours", SETTINGS) as escrowmq:
        escrowmq.create_topic(TOPIC, queues=QUEUES)
        namesrv = escrowmq.namesrv_address
        sending = Benchmark(namesrv, directory / "1", batch=batch, threads=THREADS, pause_ms=10)
        wait_for_new_halves(escrowmq)
        # The pauses are the load of the test: the benchmark sends, and kills come at random times.
        for _ in range(kills):
            time.sleep(generator.uniform(*pause_s))
            escrowmq.kill()
            kills_ms.append(now_ms())
            escrowmq.start()
            wait_for_new_halves(escrowmq)  # the benchmark is connected again
        time.sleep(pause_s[1])
        sending.kill()
        kills_ms.append(now_ms())
        draining = Benchmark(namesrv, directory / "2", batch=batch, threads=1, pause_ms=600_000)
        wait_until_all_decided(escrowmq)
        draining.kill()
        with Client(escrowmq.address) as client:
            delivered = Counter(
                record.properties["UNIQ_KEY"]
                for queue_id in range(QUEUES)
                for record in client.pull_all(TOPIC, queue_id)
            )
    assert_clean(escrowmq.store, settings_of(SETTINGS))
    return BenchmarkRun(read_log(escrowmq.store), delivered, sending, draining, kills_ms)


def wait_for_new_halves(escrowmq: EscrowMQ) -> None:
    with Client(escrowmq.address) as client:
        count = client.max_offset(HALF_TOPIC, 0) + 50
        wait_until(
            lambda: client.max_offset(HALF_TOPIC, 0) >= count,
            "the benchmark has parked 50 halves",
            timeout_s=TIMEOUT_S,
        )


def wait_until_all_decided(escrowmq: EscrowMQ) -> None:
    with Client(escrowmq.address) as client:
        wait_until(
            lambda: client.max_offset(HALF_TOPIC, 0) == client.max_offset(OP_TOPIC, 0),
            "every half has an op",
            timeout_s=TIMEOUT_S,
        )


def assert_ended_as_planned(run: BenchmarkRun) -> None:
    contents = run.log
    assert set(contents.parked.values()) == {1}  # a repeated send parks no second half
    assert run.delivered == Counter(contents.committed())
    assert contents.stranded == 0
    assert set(contents.checks.values()) <= {1}  # the checks of a half have different numbers
    check_numbers: dict[int, list[int]] = {}
    for half, number in contents.checks:
        check_numbers.setdefault(half, []).append(number)
    for numbers in check_numbers.values():
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
    for half, number in contents.needless_checks():
        # The end must have been in flight when the broker or the benchmark was killed.
        previous_ms = contents.times_ms[half, number - 1]
        assert any(0 <= kill_ms - previous_ms <= IN_FLIGHT_MS for kill_ms in run.kills_ms), str(run)


@pytest.mark.nightly
def test_without_kills_only_undecided_halves_are_checked(tmp_path: Path) -> None:
    run = run_benchmark(tmp_path, kills=0, pause_s=(0, 14))
    log.info("%s", run)
    assert_ended_as_planned(run)
    assert run.sending.unexpected_checks == []
    assert run.sending.highest_count("UnexpectedCheck") == 0
    assert run.sending.highest_count("Check") > 0
    contents = run.log
    assert contents.left_open() <= {contents.keys[half] for half, _ in contents.checks}
    # The kill of the first benchmark may lose ends: the second one is checked for these halves.
    assert len(contents.needless_checks()) == len(run.draining.unexpected_checks), str(run)


@pytest.mark.parametrize(
    ("kills", "pause_s"),
    [(2, (1.5, 2.5)), pytest.param(10, (3.0, 6.0), marks=pytest.mark.nightly)],
    ids=["2 kills", "10 kills"],
)
def test_every_committed_message_is_delivered_once_although_the_broker_is_killed(
    kills: int, pause_s: tuple[float, float], tmp_path: Path
) -> None:
    run = run_benchmark(tmp_path, kills=kills, pause_s=pause_s)
    log.info("%s", run)
    assert_ended_as_planned(run)
    assert len(run.delivered) > 100 * kills, str(run)
