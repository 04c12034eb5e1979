"""Very many open transactions: memory, restart, and all of them due at once."""

from __future__ import annotations

import struct
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
from bench.servers import EscrowMQ, client, cpu_s, first_send_s, memory_bytes
from tests.interop.remoting import Client

COLUMNS = ("what", "figure", "goal")
GROUP = "bench-producers"
TOPIC = "bench-halves"
PIPELINED = 500
NEVER = {"transactionTimeOut": 3_600_000, "transactionCheckInterval": 3_600_000}
DUE = {"transactionTimeOut": 1_000, "transactionCheckInterval": 1_000, "transactionCheckMax": 1_000}
RECEIVED_BYTES = 1 << 16
HEARTBEAT_S = 30.0
CHECK = b'"code":39,'
POSITION_FIELDS = (b'"tranStateTableOffset":"', b'"commitLogOffset":"')
ANSWER = (
    b'{"code":37,"extFields":{"producerGroup":"%b","tranStateTableOffset":"%%b",'
    b'"commitLogOffset":"%%b","commitOrRollback":"%%d","fromTransactionCheck":"true",'
    b'"msgId":"","transactionId":""},"flag":2,"language":"PYTHON","opaque":0,"version":401}'
    % GROUP.encode()
)
NOTES = (
    "The halves (100 bytes of body) are sent to the broker on one connection, 500 at a time. "
    "Memory is RssAnon: after they were sent, less that of a broker that has had other sends, and "
    "after a restart, when it holds nothing else, less that of a new one.",
    "Start: from the command to the first accepted message, with the start of Python. `kill -9` "
    "comes right after the last half, so the log behind the last checkpoint is read as well. The "
    "processor time is that of the broker.",
    "The goals for the log are older than the checksum of a record, which takes 20 bytes: 60 for "
    "half, final and op.",
    "Due at once: the broker starts when every half is overdue, and then a producer connects. "
    "Sends go on meanwhile, 16 x 1. Idle: the same load on a broker without halves, right before.",
)


def rows(plan: Plan) -> ResultTable:
    count = plan.halves
    with directory() as path:
        bytes_of = _log_bytes(path / "bytes")
        server = EscrowMQ(path / "halves", NEVER)
        with _running(server):
            idle_bytes = _own_bytes(server)
            _sends(server, plan)
            warm_bytes = _own_bytes(server)
            fill_s = _send_halves(server, count)
            sent_bytes = _own_bytes(server)
            server.kill()
            killed = _restart(server)
            clean = _restart(server)
            start_bytes = _own_bytes(server)
        busy, idle, answered_s = {}, {}, 0.0
        for what, verdict in (("not answered", None), ("UNKNOWN", 0), ("ROLLBACK", 12)):
            with _running(EscrowMQ(path / "idle", DUE)) as without_halves:
                idle[what] = _sends(without_halves, plan)
            due = EscrowMQ(path / "halves", DUE)
            with _running(due), _answering(due, verdict) as answering:
                busy[what] = _sends(due, plan)
                if verdict == 12:
                    answered_s = answering.wait_for(count)
    results: list[Sequence[str]] = [
        (
            f"memory for each of {count:,} halves, sent",
            _each(sent_bytes - warm_bytes, count),
            "at most 250 bytes",
        ),
        (
            f"memory for each of {count:,} halves, after a start",
            _each(start_bytes - idle_bytes, count),
            "at most 250 bytes",
        ),
        (f"{count:,} halves sent", f"{fill_s:.1f} s", ""),
        (f"start with {count:,} halves after kill -9", killed, "at most 4 s"),
        (f"start with {count:,} halves after a stop", clean, "at most 4 s"),
        *(
            (
                f"p99 of sends while {count:,} halves are due at once, checks {what}",
                f"{outcome.p99_us / 1000:.1f} ms, idle {idle[what].p99_us / 1000:.1f} ms, "
                f"{outcome.p99_us / idle[what].p99_us:.1f}x",
                "at most 3x",
            )
            for what, outcome in busy.items()
        ),
        (f"all {count:,} checked and rolled back", f"{answered_s:.0f} s", ""),
        *bytes_of,
    ]
    return ResultTable(results, list(NOTES), COLUMNS)


def _own_bytes(server: EscrowMQ) -> int:
    return memory_bytes(server.pids[0], "RssAnon")


def _each(total_bytes: int, count: int) -> str:
    return f"{total_bytes / count:.0f} bytes"


def _restart(server: EscrowMQ) -> str:
    """Restart a broker, and return how long it took to the first message."""
    seconds = first_send_s(server)
    return f"{seconds:.1f} s, {cpu_s(server.pids[0]):.1f} s of CPU"


@contextmanager
def _running(server: EscrowMQ) -> Iterator[EscrowMQ]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _sends(server: EscrowMQ, plan: Plan) -> Outcome:
    load = shaped("send", plan, 16, 1)
    with client(server) as admin:
        admin.create_topic(load.topic, queues=QUEUES)
    return run(load, server.ports, server.pids)


def _send_halves(server: EscrowMQ, count: int) -> float:
    """Park halves as fast as one connection can, and return how long that took."""
    with client(server, timeout_s=120) as producer:
        producer.create_topic(TOPIC, queues=1)
        # Let the client encode one request, and change the number in its key for the others.
        producer.send_half(TOPIC, b"x" * 100, {"UNIQ_KEY": f"{0:032X}"}, group=GROUP)
        before, _, after = producer.sent_frame.partition(b"%032X" % 0)
        began_s = time.perf_counter()
        for begin in range(1, count, PIPELINED):
            numbers = range(begin, min(begin + PIPELINED, count))
            producer.socket.sendall(b"".join(b"%b%032X%b" % (before, n, after) for n in numbers))
            for _ in numbers:
                header, _ = producer.receive_frame()
                assert header["code"] == 0, header
        return time.perf_counter() - began_s


@dataclass
class _Answering:
    """A producer that answers every check with a verdict, or does not answer.

    It does little for each check: broker, load and producer may have to share two cores. The last
    request of `caller` is a heartbeat, and is repeated: a member without any is removed.
    """

    caller: Client
    verdict: int | None
    answered: int = 0
    began_s: float = 0.0

    def run(self) -> None:
        received, heartbeat = b"", self.caller.sent_frame
        next_heartbeat_s = self.began_s + HEARTBEAT_S
        try:
            while data := self.caller.socket.recv(RECEIVED_BYTES):
                if time.monotonic() >= next_heartbeat_s:
                    self.caller.socket.sendall(heartbeat)
                    next_heartbeat_s += HEARTBEAT_S
                complete, received = _split_frames(received + data)
                answers = [self._answer(frame) for frame in complete if CHECK in frame]
                if self.verdict is not None and answers:
                    self.caller.socket.sendall(b"".join(answers))
                    self.answered += len(answers)
        except OSError:
            return  # closed: the benchmark is over

    def _answer(self, check: bytes) -> bytes:
        queue_offset, log_offset = (_field(check, name) for name in POSITION_FIELDS)
        header = ANSWER % (queue_offset, log_offset, self.verdict or 0)
        return struct.pack(">II", 4 + len(header), len(header)) + header

    def wait_for(self, count: int) -> float:
        while self.answered < count:
            time.sleep(0.2)
        return time.monotonic() - self.began_s


def _split_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete frames, and what is left."""
    frames, position = [], 0
    while len(data) >= position + 4:
        end = position + 4 + int.from_bytes(data[position : position + 4], "big")
        if end > len(data):
            break
        frames.append(data[position:end])
        position = end
    return frames, data[position:]


def _field(frame: bytes, name: bytes) -> bytes:
    begin = frame.index(name) + len(name)
    return frame[begin : frame.index(b'"', begin)]


@contextmanager
def _answering(server: EscrowMQ, verdict: int | None) -> Iterator[_Answering]:
    caller = client(server, timeout_s=600)
    caller.heartbeat("bench-1", producer_groups=(GROUP,))
    answering = _Answering(caller, verdict, began_s=time.monotonic())
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
