"""How late checks reach a producer: alone, and beside other transactions."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.broker import QUEUES, ResultTable, shaped
from bench.generator import Outcome, run
from bench.measure import Plan
from bench.samples import directory
from bench.servers import EscrowMQ, client
from tests.interop.remoting import UNKNOWN, Client

COLUMNS = ("what", "checks", "p50", "p99", "longest", "goal")
GROUP = "bench-checked"
TOPIC, OTHERS = "bench-checks", "bench-others"
HALVES, QUICK_HALVES = 5_000, 1_000
ROUNDS = 4  # checks of each half
INTERVAL_S = 5.0
STEP_S = 0.01  # between two groups of halves, so that they do not fall due all at once
SETTINGS = {
    "transactionTimeOut": round(INTERVAL_S * 1000),
    "transactionCheckInterval": round(INTERVAL_S * 1000),
    "transactionCheckMax": 1_000,
}
CHECK_TRANSACTION_STATE, END_TRANSACTION = 39, 37
NOTES = (
    "One connection parks halves over five seconds and answers every check with UNKNOWN, so each "
    "half is due every five seconds. The time counts until the check is read, in one Python "
    "process; from the due time, which is that of the send and five seconds for the first check, "
    "and that at which the check before was read and five seconds for the others.",
)


def rows(plan: Plan) -> ResultTable:
    results: list[Sequence[str]] = []
    notes = list(NOTES)
    for what, has_others in (("alone", False), ("beside other transactions", True)):
        with directory() as path:
            server = EscrowMQ(path / "ours", SETTINGS)
            server.start()
            try:
                late_s, outcome = _measure(server, plan, has_others=has_others)
            finally:
                server.stop()
        results.append(_row(what, late_s))
        if outcome is not None:
            share = outcome.server_cpu_s / outcome.seconds
            notes.append(
                f"The others: {outcome.rate:,.0f} transactions a second on two connections; the "
                f"broker used {share:.0%} of a core, other processes {outcome.others_cores:.1f}."
            )
    return ResultTable(results, notes, COLUMNS)


def _measure(
    server: EscrowMQ, plan: Plan, *, has_others: bool
) -> tuple[list[float], Outcome | None]:
    count = QUICK_HALVES if plan.quick else HALVES
    with client(server, timeout_s=INTERVAL_S * 4) as caller:
        caller.create_topic(TOPIC, queues=1)
        caller.create_topic(OTHERS, queues=QUEUES)
        producer = _Producer(caller, count)
        reading = threading.Thread(target=producer.read_checks, daemon=True)
        reading.start()
        producer.send_halves()
        outcome = None
        if has_others:
            load = replace(shaped("tx", plan, 2, 1), topic=OTHERS, seconds=INTERVAL_S * ROUNDS)
            outcome = run(load, server.ports, server.pids)
        reading.join()
    return sorted(producer.late_s), outcome


@dataclass
class _Producer:
    """Parks halves evenly over one interval, and answers their checks with UNKNOWN."""

    caller: Client
    count: int
    late_s: list[float] = field(default_factory=list)
    _due_s: dict[str, float] = field(default_factory=dict)  # by unique key
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def send_halves(self) -> None:
        step_count = round(INTERVAL_S / STEP_S)
        step_halves = self.count // step_count
        began_s = time.perf_counter()
        for step in range(step_count):
            time.sleep(max(0.0, began_s + step * STEP_S - time.perf_counter()))
            for number in range(step * step_halves, (step + 1) * step_halves):
                self._send_half(f"{number:032X}")

    def _send_half(self, key: str) -> None:
        properties = {"UNIQ_KEY": key, "TRAN_MSG": "true", "PGROUP": GROUP}
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
        fields = {"a": GROUP, "b": TOPIC, "e": 0, "f": 0, "g": 0, "h": 0, "i": text}
        self._due_s[key] = time.perf_counter() + INTERVAL_S
        with self._writing:
            self.caller.send_request(310, fields, b"x" * 100, flag=0)

    def read_checks(self) -> None:
        while len(self.late_s) < self.count * ROUNDS:
            header, _ = self.caller.receive_frame()
            if header["code"] == CHECK_TRANSACTION_STATE:
                now_s, check = time.perf_counter(), header["extFields"]
                self.late_s.append(now_s - self._due_s[check["msgId"]])
                self._due_s[check["msgId"]] = now_s + INTERVAL_S
                self._answer(check)

    def _answer(self, check: dict[str, str]) -> None:
        fields = {
            "producerGroup": GROUP,
            "tranStateTableOffset": check["tranStateTableOffset"],
            "commitLogOffset": check["commitLogOffset"],
            "commitOrRollback": UNKNOWN,
            "fromTransactionCheck": True,
            "msgId": check["msgId"],
            "transactionId": check["transactionId"],
        }
        with self._writing:
            self.caller.send_one_way(END_TRANSACTION, fields)


def _row(what: str, late_s: list[float]) -> Sequence[str]:
    p50, p99 = statistics.median(late_s), late_s[int(len(late_s) * 0.99)]
    cells = (f"{seconds * 1000:.0f} ms" for seconds in (p50, p99, late_s[-1]))
    return what, f"{len(late_s):,}", *cells, "p99 at most 100 ms"
