"""RocketMQ's own transaction benchmark against our broker, which is killed while it runs.

Every message of it carries its fate: a byte for what its local transaction says, twenty for what
the checks are told. So each half in the log says itself how it has to end, however it gets there,
and can be compared with what a consumer reads.

The benchmark counts checks that it finds needless as unexpected. An end goes one way: one that is
on its way when the broker is killed is lost, and its half must be asked about. Its third count,
of repeated checks, is always 0: 5.5.0 compares with a map that nothing is ever put into. The
journal in our log says which checks were sent, and how often.
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
from tests.interop.stores import open_store, settings_of
from tests.support.stores import assert_clean

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
DRAIN_S = 60.0
UNDER_WAY_MS = 2_000
COMMITTED, ROLLED_BACK, UNDECIDED = range(3)  # the order of Java's LocalTransactionState
FATE = slice(16, 16 + 1 + 20)  # behind batch and number: one byte for the send, twenty for checks


class Benchmark:
    """TransactionProducer of RocketMQ's examples. It sends until it is killed."""

    def __init__(self, namesrv: str, directory: Path, *, batch: int, threads: int, pause_ms: int):
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
    def unexpected(self) -> list[str]:
        return [line for line in self._lines() if "unexpected check" in line]

    def most(self, name: str) -> int:
        """The highest count of this name in its reports; each is over the ten seconds before."""
        found = re.findall(rf"\b{name}: +(\d+)", "\n".join(self._lines()))
        return max(map(int, found), default=0)

    def _lines(self) -> list[str]:
        return self._output.read_text(errors="replace").splitlines()


@dataclass
class Books:
    """What our log says, once all is over: by unique key, or by place in the half queue."""

    fates: dict[str, list[int]] = field(default_factory=dict)
    parked: Counter[str] = field(default_factory=Counter)
    asked: Counter[tuple[int, int]] = field(default_factory=Counter)  # half, which check
    keys: dict[int, str] = field(default_factory=dict)
    when_ms: dict[tuple[int, int], int] = field(default_factory=dict)  # 0: it was parked
    stranded: int = 0

    def committed(self) -> set[str]:
        return {key for key, fate in self.fates.items() if end_of(fate) == COMMITTED}

    def left_open(self) -> set[str]:
        """Those that only a check can decide."""
        return {key for key, fate in self.fates.items() if fate[0] == UNDECIDED}

    def needless(self) -> list[tuple[int, int]]:
        """Checks of what the producer had decided by then, if only it could tell us."""
        return [
            (half, number)
            for half, number in self.asked
            if any(state != UNDECIDED for state in self.fates[self.keys[half]][:number])
        ]


def end_of(fate: list[int]) -> int:
    return next(state for state in fate if state != UNDECIDED)


def read_books(directory: Path) -> Books:
    books = Books()
    store = open_store(directory, settings_of(SETTINGS))
    try:
        for record in store.records():
            if record.topic == HALF_TOPIC:
                key = decode_properties(record.properties)["UNIQ_KEY"]
                books.parked[key] += 1
                books.keys[record.queue_offset] = key
                books.when_ms[record.queue_offset, 0] = record.stored_ms
                books.fates[key] = list(bytes(record.body)[FATE])
            elif record.topic == names.JOURNAL_TOPIC:
                step = decode_journal_entry(record)
                if step.event == "asked":
                    books.asked[step.half_offset, step.check_number] += 1
                    books.when_ms[step.half_offset, step.check_number] = record.stored_ms
            elif record.topic == names.STRANDED_TOPIC:
                books.stranded += 1
    finally:
        store.close()
    return books


@dataclass
class Run:
    books: Books
    delivered: Counter[str]
    sending: Benchmark
    draining: Benchmark
    kills_ms: list[int]  # of either side

    def __str__(self) -> str:
        books = self.books
        return (
            f"{len(books.fates)} halves, {sum(self.delivered.values())} delivered,"
            f" {sum(books.asked.values())} checks of {len({at for at, _ in books.asked})} halves,"
            f" {len(books.needless())} of them needless,"
            f" unexpected {len(self.sending.unexpected)} + {len(self.draining.unexpected)},"
            f" at most {self.sending.most('Send Failed')} failed sends in ten seconds"
        )


def run(directory: Path, *, kills: int, pause_s: tuple[float, float]) -> Run:
    if reason := jars.unavailable_reason():
        pytest.skip(reason)
    chance = random.Random(kills)
    kills_ms = []
    batch = now_ms()
    with EscrowMQ(directory / "ours", SETTINGS) as ours:
        ours.create_topic(TOPIC, queues=QUEUES)
        where = ours.namesrv_address
        sending = Benchmark(where, directory / "1", batch=batch, threads=THREADS, pause_ms=10)
        await_growth(ours)
        for _ in range(kills):
            time.sleep(chance.uniform(*pause_s))
            ours.kill()
            kills_ms.append(now_ms())
            ours.start()
            await_growth(ours)  # it has found us again
        time.sleep(pause_s[1])
        sending.kill()
        kills_ms.append(now_ms())
        draining = Benchmark(where, directory / "2", batch=batch, threads=1, pause_ms=600_000)
        await_all_settled(ours)
        draining.kill()
        with Client(ours.address) as client:
            delivered = Counter(
                record.properties["UNIQ_KEY"]
                for queue_id in range(QUEUES)
                for record in client.pull_all(TOPIC, queue_id)
            )
    assert_clean(ours.store, settings_of(SETTINGS))
    return Run(read_books(ours.store), delivered, sending, draining, kills_ms)


def await_growth(ours: EscrowMQ) -> None:
    deadline = time.monotonic() + DRAIN_S
    with Client(ours.address) as client:
        wanted = client.max_offset(HALF_TOPIC, 0) + 50
        while client.max_offset(HALF_TOPIC, 0) < wanted:
            assert time.monotonic() < deadline, "the benchmark sends nothing"
            time.sleep(0.05)


def await_all_settled(ours: EscrowMQ) -> None:
    """One op for every half."""
    deadline = time.monotonic() + DRAIN_S
    with Client(ours.address) as client:
        while True:
            halves, ops = (client.max_offset(topic, 0) for topic in (HALF_TOPIC, OP_TOPIC))
            if halves == ops:
                return
            assert time.monotonic() < deadline, f"{halves - ops} of {halves} are still open"
            time.sleep(0.2)


def assert_each_as_it_said(run: Run) -> None:
    books = run.books
    assert set(books.parked.values()) == {1}  # a repeated send parks nothing
    assert run.delivered == Counter(books.committed())
    assert books.stranded == 0
    assert set(books.asked.values()) <= {1}  # no check has the number of another
    numbers: dict[int, list[int]] = {}
    for half, number in books.asked:
        numbers.setdefault(half, []).append(number)
    for asked in numbers.values():
        assert sorted(asked) == list(range(1, len(asked) + 1))
    for half, number in books.needless():
        # What it answered before, or said at once, was on its way when one of the two was killed.
        before_ms = books.when_ms[half, number - 1]
        assert any(0 <= at_ms - before_ms <= UNDER_WAY_MS for at_ms in run.kills_ms), str(run)


@pytest.mark.nightly
def test_without_kills_only_what_is_undecided_is_asked_about(tmp_path: Path) -> None:
    done = run(tmp_path, kills=0, pause_s=(0, 14))
    log.info("%s", done)
    assert_each_as_it_said(done)
    assert done.sending.unexpected == []
    assert done.sending.most("UnexpectedCheck") == 0
    assert done.sending.most("Check") > 0
    books = done.books
    assert books.left_open() <= {books.keys[half] for half, _ in books.asked}
    # The benchmark is killed at the end, and what it had not said by then the next one is asked.
    assert len(books.needless()) == len(done.draining.unexpected), str(done)


@pytest.mark.parametrize(
    ("kills", "pause_s"),
    [(2, (1.5, 2.5)), pytest.param(10, (3.0, 6.0), marks=pytest.mark.nightly)],
    ids=["twice", "ten times"],
)
def test_every_committed_message_comes_once_whenever_the_broker_is_killed(
    kills: int, pause_s: tuple[float, float], tmp_path: Path
) -> None:
    done = run(tmp_path, kills=kills, pause_s=pause_s)
    log.info("%s", done)
    assert_each_as_it_said(done)
    assert len(done.delivered) > 100 * kills, str(done)
