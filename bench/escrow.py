"""Very many open transactions: memory, restart, and all of them due at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.broker import QUEUES, ResultTable, shaped
from bench.generator import Outcome, run
from bench.measure import Plan
from bench.samples import directory
from bench.servers import EscrowMQ, client, first_send_s, memory_bytes
from escrowmq.config import StoreConfig
from escrowmq.escrow.records import make_half
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.interop.remoting import Client

COLUMNS = ("what", "figure", "goal")
GROUP = "bench-producers"
HOST = b"\x7f\0\0\x01\0\0\0\0"
PARKED_AT_ONCE = 500
NEVER = {"transactionTimeOut": 3_600_000, "transactionCheckInterval": 3_600_000}
NOTES = (
    "The halves (100 bytes of body) are written into the log before the broker starts, so that its "
    "memory holds nothing else. Memory is RssAnon: the log's mapped pages are the file's.",
    "Due at once: every half is overdue when its only producer connects; it answers each question "
    "with a rollback. Sends go on meanwhile, 16 x 1, beside the same load on an empty broker.",
)


def rows(plan: Plan) -> ResultTable:
    count = plan.halves
    with directory() as path:
        bytes_of = _log_bytes(path / "bytes")
        empty = EscrowMQ(path / "empty", NEVER)
        full = EscrowMQ(path / "full", NEVER)
        _lay_halves(full.data, count)
        with _running(empty):
            idle_bytes = memory_bytes(empty.pids[0], "RssAnon")
            idle = _sends(empty, plan)
        with _running(full):  # the first start looks for halves that another broker may have left
            pass
        start_s = first_send_s(full)  # starts it
        try:
            per_half = (memory_bytes(full.pids[0], "RssAnon") - idle_bytes) / count
        finally:
            full.stop()
        overdue = EscrowMQ(path / "overdue", {"transactionTimeOut": 1000})
        _lay_halves(overdue.data, count)
        with _running(overdue), _answering(overdue) as answering:
            busy = _sends(overdue, plan)
            asked_s = answering.wait_for(count)
    results: list[Sequence[str]] = [
        (f"memory for each of {count:,} open halves", f"{per_half:.0f} bytes", "at most 500"),
        (f"start with {count:,} open halves, to the first send", f"{start_s:.1f} s", "under 10 s"),
        (
            f"p99 of sends while {count:,} halves are due at once",
            f"{busy.p99_us / 1000:.1f} ms, idle {idle.p99_us / 1000:.1f} ms, "
            f"{busy.p99_us / idle.p99_us:.1f}x",
            "at most 5x",
        ),
        (f"all {count:,} asked about and answered", f"{asked_s:.0f} s", ""),
        *bytes_of,
    ]
    return ResultTable(results, list(NOTES), COLUMNS)


@contextmanager
def _running(server: EscrowMQ) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()


def _sends(server: EscrowMQ, plan: Plan) -> Outcome:
    load = shaped("send", plan, 16, 1)
    with client(server) as admin:
        admin.create_topic(load.topic, queues=QUEUES)
    return run(load, server.ports, server.pids)


def _lay_halves(data: Path, count: int) -> None:
    data.mkdir(parents=True)
    store = MessageStore.open(RealDisk(data), StoreConfig(), store_host=HOST)
    now_ms = int(time.time() * 1000) - 60_000
    for begin in range(0, count, PARKED_AT_ONCE):
        records = []
        for number in range(begin, min(begin + PARKED_AT_ONCE, count)):
            key = b"7F0000010001BE7C%016X" % number
            properties = b"UNIQ_KEY\x01%b\x02PGROUP\x01%b\x02TRAN_MSG\x01true\x02"
            body = b"x" * 100
            plain = NewRecord("bench", 0, body, properties % (key, GROUP.encode()))
            records.append(make_half(plain))
        store.append(records, now_ms=now_ms)
        if begin % 100_000 == 0:
            store.checkpoint()
    store.close()


@dataclass
class _Answering:
    """A producer that answers every check with ROLLBACK."""

    caller: Client
    answered: int = 0
    began_s: float = 0.0

    def run(self) -> None:
        try:
            while True:
                header, _ = self.caller.next_frame()
                if header.get("code") == 39:
                    self._answer(header["extFields"])
        except OSError:
            return  # closed: the benchmark is over

    def _answer(self, checks: dict[str, str]) -> None:
        self.caller.send_one_way(
            37,
            {
                "producerGroup": GROUP,
                "tranStateTableOffset": checks["tranStateTableOffset"],
                "commitLogOffset": checks["commitLogOffset"],
                "commitOrRollback": 12,
                "fromTransactionCheck": True,
                "msgId": checks["msgId"],
                "transactionId": checks["transactionId"],
            },
        )
        self.answered += 1

    def wait_for(self, count: int) -> float:
        while self.answered < count:
            time.sleep(0.2)
        return time.monotonic() - self.began_s


@contextmanager
def _answering(server: EscrowMQ) -> Iterator[_Answering]:
    caller = client(server, timeout_s=600)
    caller.heartbeat("bench-1", producer_groups=(GROUP,))
    answering = _Answering(caller, began_s=time.monotonic())
    thread = threading.Thread(target=answering.run, daemon=True)
    thread.start()
    try:
        yield answering
    finally:
        caller.close()
        thread.join(5)


def _log_bytes(path: Path) -> list[Sequence[str]]:
    """Measure how many bytes a commit and a check add to the log."""
    server = EscrowMQ(path, {"transactionTimeOut": 500, "transactionCheckInterval": 500})
    with _running(server), client(server) as producer:
        producer.create_topic("bench", queues=1)
        producer.heartbeat("bench-1", producer_groups=(GROUP,))
        before = _end(producer)
        half = producer.send_half("bench", b"x" * 1024, {"UNIQ_KEY": "7F00" * 8}, group=GROUP)
        producer.end_transaction(half, 8, topic="bench", group=GROUP)
        commit = _end(producer) - before - _probe_bytes(producer)
        producer.send_half("bench", b"x" * 1024, {"UNIQ_KEY": "7F01" * 8}, group=GROUP)
        began = _end(producer)
        time.sleep(5)
        grown = _end(producer) - began - _probe_bytes(producer)
        checks = sum(1 for header, _ in producer.pending_frames if header["code"] == 39)
    return [
        ("log for a committed 1 KiB message", f"{commit:,} bytes", "at most 2,740"),
        ("log for a check", f"{grown / checks:.0f} bytes", "at most 150"),
    ]


def _end(caller: Client) -> int:
    return caller.send("probe", b"").log_offset


def _probe_bytes(caller: Client) -> int:
    first = _end(caller)
    return _end(caller) - first
