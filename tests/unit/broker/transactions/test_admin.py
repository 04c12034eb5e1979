"""Requests of operators about transactions: lists, histories, decisions, resuming."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.broker.transactions.admin import PAGE_ENTRIES_MAX
from escrowmq.config import Config, StoreConfig, TransactionConfig
from escrowmq.message import names
from escrowmq.message.keys import encode_offset_id
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    Header,
    ListTransactions,
    ResumeCheckHalfMessage,
    ResumeTransaction,
    SettleTransaction,
    TransactionHeader,
)
from escrowmq.testing.disks import MemoryDisk
from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import bodies, new_request, stored_records
from tests.support.escrows import end_request, half_request, position_of
from tests.support.stores import HOST, NOW_MS

SETTINGS = StoreConfig(
    segment_bytes=64 << 10, queue_file_bytes=2000, index_slots=101, index_entries=400
)
IMMUNITY_MS, INTERVAL_MS, CHECKS_MAX = 6_000, 30_000, 2


class Bench(BrokerBench):
    """A broker with the requests of an operator."""

    def __init__(self, disk: MemoryDisk | None = None, now_ms: int = NOW_MS) -> None:
        transaction = TransactionConfig(
            immunity_ms=IMMUNITY_MS, check_interval_ms=INTERVAL_MS, checks_max=CHECKS_MAX
        )
        super().__init__(disk, config=Config(store=SETTINGS, transaction=transaction))
        self.now_ms = now_ms

    def request(self, code: int, fields: Header) -> Response:
        [response] = self.turn(new_request(code, fields), at_ms=self.now_ms)
        return response

    def park(self, key: str, *, topic: str = "T", group: str = "p", **properties: str) -> Response:
        """Park a half and return the response to its send."""
        body = b"body of " + key.encode()
        half = half_request(key, body=body, topic=topic, group=group, **properties)
        [response] = self.turn(half, at_ms=self.now_ms)
        return response

    def advance(self, ms: int) -> None:
        """Move the clock and tick."""
        self.now_ms += ms
        for _ in range(2):
            self.tick(self.now_ms)

    def end(self, half: Response, verdict: int, *, check: bool = False) -> Response:
        """End the transaction of a half, which is named by the response to its send."""
        request = end_request(position_of(half), verdict, check=check)
        [response] = self.turn(request, at_ms=self.now_ms)
        return response

    def page(self, **filters: Any) -> Any:
        """Return one page of a list."""
        response = self.request(RequestCode.LIST_TRANSACTIONS, ListTransactions(**filters))
        assert response.code == 0, response.remark
        return json.loads(response.body)

    def ids(self, **filters: Any) -> list[str]:
        """Return the transaction ids of all pages of a list."""
        ids = []
        page = self.page(**filters)
        while True:
            ids += [entry["transactionId"] for entry in page["transactions"]]
            if not page["more"]:
                return ids
            page = self.page(**{**filters, "after": page["nextAfter"]})

    def history(self, transaction_id: str) -> Any:
        fields = TransactionHeader(transaction_id=transaction_id)
        response = self.request(RequestCode.SHOW_TRANSACTION, fields)
        assert response.code == 0, response.remark
        return json.loads(response.body)

    def steps(self, transaction_id: str) -> list[str]:
        return [step["what"] for step in self.history(transaction_id)["steps"]]

    def settle(
        self, transaction_id: str, verdict: int, reason: str = "because", by: str = "ann"
    ) -> Response:
        fields = SettleTransaction(
            transaction_id=transaction_id, commit_or_rollback=verdict, reason=reason, operator=by
        )
        return self.request(RequestCode.SETTLE_TRANSACTION, fields)

    def resume(self, transaction_id: str) -> Response:
        fields = ResumeTransaction(
            transaction_id=transaction_id, reason="try again", operator="ann"
        )
        return self.request(RequestCode.RESUME_TRANSACTION, fields)

    def strand(self) -> None:
        """Let all checks stay unanswered."""
        self.advance(IMMUNITY_MS)
        for _ in range(CHECKS_MAX):
            self.advance(INTERVAL_MS)

    def restarted(self, *, is_stopped: bool) -> Bench:
        """Start again after a stop, or after a crash, which leaves no snapshot."""
        if is_stopped:
            self.broker.transactions.save(force=True)
        self.store.close()
        return Bench(self.disk, self.now_ms)


# --- lists ---------------------------------------------------------------------------------------


def test_a_list_has_undecided_transactions_with_their_due_times() -> None:
    bench = Bench()
    bench.park("A")
    [entry] = bench.page()["transactions"]
    assert entry["transactionId"] == "A"
    assert (entry["group"], entry["topic"], entry["state"]) == ("p", "T", "open")
    assert (entry["parkedAt"], entry["checks"]) == (NOW_MS, 0)
    assert entry["nextDue"] == NOW_MS + IMMUNITY_MS


def test_filters_are_combined() -> None:
    bench = Bench()
    bench.park("A", topic="T", group="p")
    bench.park("B", topic="U", group="p")
    bench.advance(IMMUNITY_MS)
    bench.park("C", topic="U", group="q")
    assert bench.ids() == ["A", "B", "C"]
    assert bench.ids(topic="U") == ["B", "C"]
    assert bench.ids(topic="U", group="p") == ["B"]
    assert bench.ids(older_than_ms=1) == ["A", "B"]
    assert bench.ids(checks_min=1) == ["A", "B"]
    assert bench.ids(checks_min=2) == []
    assert bench.ids(state="stranded") == []
    bench.advance(INTERVAL_MS)
    bench.advance(INTERVAL_MS)
    assert bench.ids(state="stranded") == ["A", "B"]
    assert bench.ids(state="open") == ["C"]


def test_pages_contain_each_transaction_once() -> None:
    bench = Bench()
    keys = [f"K{number}" for number in range(23)]
    halves = {key: bench.park(key) for key in keys}
    for key in keys[::3]:
        bench.end(halves[key], COMMIT)
    open_keys = [key for index, key in enumerate(keys) if index % 3]
    for count_max in (1, 2, 5, 100):
        assert bench.ids(count_max=count_max) == open_keys


def test_a_page_scans_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.broker.transactions.admin.PAGE_SCANNED_MAX", 4)
    bench = Bench()
    for number in range(10):
        bench.park(f"K{number}", topic="rare" if number == 9 else "T")
    first = bench.page(topic="rare")
    assert (first["transactions"], first["more"]) == ([], True)
    assert bench.ids(topic="rare") == ["K9"]


def test_a_page_never_exceeds_its_limit() -> None:
    bench = Bench()
    for number in range(3):
        bench.park(f"K{number}")
    assert len(bench.page(count_max=PAGE_ENTRIES_MAX + 1)["transactions"]) == 3
    response = bench.request(RequestCode.LIST_TRANSACTIONS, ListTransactions(count_max=0))
    assert response.code == ResponseCode.INVALID_PARAMETER
    response = bench.request(RequestCode.LIST_TRANSACTIONS, ListTransactions(state="lost"))
    assert response.code == ResponseCode.INVALID_PARAMETER


def test_decided_transactions_are_listed_newest_first() -> None:
    bench = Bench()
    for number in range(40):
        half = bench.park(f"K{number:02d}", topic="T" if number % 4 else "U")
        bench.end(half, ROLLBACK if number % 2 else COMMIT)
    committed = [f"K{number:02d}" for number in range(38, -1, -2)]
    assert bench.ids(state="committed") == committed
    assert bench.ids(state="committed", count_max=3) == committed
    assert bench.ids(state="committed", topic="U") == committed[1::2]
    assert bench.ids(state="rolled_back")[:2] == ["K39", "K37"]
    assert bench.ids() == []


def test_a_moved_transaction_is_listed_once() -> None:
    bench = Bench()
    bench.park("A")
    bench.strand()
    assert bench.resume("A").code == 0
    assert bench.ids() == ["A"]
    assert bench.ids(state="stranded") == []
    bench.settle("A", COMMIT)
    assert bench.ids(state="committed") == ["A"]


# --- histories -----------------------------------------------------------------------------------


def test_the_history_of_an_open_transaction_says_why_it_is_pending() -> None:
    bench = Bench()
    bench.park("A")
    history = bench.history("A")
    assert [step["what"] for step in history["steps"]] == ["parked"]
    assert "the first check is not due yet" in history["pendingBecause"]
    bench.channel.is_open = False
    bench.broker.channel_closed(bench.channel)
    bench.channel.is_open = True
    bench.now_ms += IMMUNITY_MS
    assert "no producer of group p is connected" in bench.history("A")["pendingBecause"]


def test_a_history_has_every_check_and_its_answer() -> None:
    bench = Bench()
    half = bench.park("A")
    bench.advance(IMMUNITY_MS)
    assert "has not been answered" in bench.history("A")["pendingBecause"]
    bench.now_ms += 10
    bench.end(half, UNKNOWN, check=True)
    history = bench.history("A")
    assert "was answered with UNKNOWN" in history["pendingBecause"]
    assert history["transaction"]["nextDue"] == NOW_MS + IMMUNITY_MS + INTERVAL_MS
    parked, check, unknown = history["steps"]
    assert (parked["what"], parked["at"]) == ("parked", NOW_MS)
    assert (check["what"], check["at"]) == ("asked", NOW_MS + IMMUNITY_MS)
    assert (check["who"], check["detail"]) == (bench.channel.address, "check 1")
    assert (unknown["what"], unknown["at"]) == ("unknown", NOW_MS + IMMUNITY_MS + 10)
    bench.end(half, COMMIT, check=True)
    history = bench.history("A")
    last = history["steps"][-1]
    assert (last["what"], last["who"]) == ("committed", f"check {bench.channel.address}")
    assert last["detail"] == "delivered to queue 0 of topic T at offset 0"
    assert history["pendingBecause"] == ""
    assert history["transaction"]["checks"] == 1


def test_a_history_has_more_checks_than_one_look_up_returns() -> None:
    bench = Bench()
    bench.broker.transactions.coordinator.config = TransactionConfig(
        immunity_ms=IMMUNITY_MS, check_interval_ms=INTERVAL_MS, checks_max=200
    )
    bench.park("A")
    bench.advance(IMMUNITY_MS)
    for _ in range(149):
        bench.advance(INTERVAL_MS)
    details = [step["detail"] for step in bench.history("A")["steps"][1:]]
    assert details == [f"check {number}" for number in range(1, 151)]


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "crashed"])
def test_histories_survive_a_restart(is_stopped: bool) -> None:
    bench = Bench()
    committed, rolled_back, answered = bench.park("C"), bench.park("R"), bench.park("A")
    bench.park("S")
    bench.park("H")
    bench.end(committed, COMMIT)
    bench.end(rolled_back, ROLLBACK)
    bench.advance(IMMUNITY_MS)
    bench.end(answered, UNKNOWN, check=True)
    bench.settle("H", ROLLBACK, "customer called")
    bench.advance(INTERVAL_MS)
    bench.settle("A", COMMIT, "the order is in the books")
    bench.advance(INTERVAL_MS)
    keys = ["C", "R", "A", "S", "H"]
    before = [bench.history(key) for key in keys]
    assert before[2]["steps"][-1]["reason"] == "the order is in the books"
    restarted = bench.restarted(is_stopped=is_stopped)
    after = [restarted.history(key) for key in keys]
    for history in (*before, *after):
        history["transaction"].pop("why", None)
    assert after == before
    assert restarted.steps("S") == ["parked", "asked", "asked", "stranded"]
    assert "checked 2 times" in restarted.history("S")["pendingBecause"]
    assert restarted.ids(checks_min=2) == ["S"]


def test_the_history_of_a_delayed_transaction_says_that_it_waits() -> None:
    bench = Bench()
    bench.park("A", DELAY="2")
    bench.settle("A", COMMIT)
    last = bench.history("A")["steps"][-1]
    assert (last["what"], last["who"]) == ("committed", "operator ann")
    assert last["detail"] == "will be delivered to queue 0 of topic T after its delay"


def test_an_unknown_transaction_is_not_found() -> None:
    bench = Bench()
    bench.park("A")
    for name in ("B", "", "zz", "00" * 16, encode_offset_id(HOST, 1 << 40)):
        response = bench.request(
            RequestCode.SHOW_TRANSACTION, TransactionHeader(transaction_id=name)
        )
        assert response.code == ResponseCode.QUERY_NOT_FOUND


def test_an_offset_id_names_a_transaction_too() -> None:
    bench = Bench()
    offset_id = bench.park("A").ext_fields["msgId"]
    assert bench.history(offset_id)["transaction"]["transactionId"] == "A"
    bench.settle(offset_id, ROLLBACK)
    assert bench.history(offset_id)["transaction"]["state"] == "rolled_back"


# --- decisions of operators ----------------------------------------------------------------------


def test_a_commit_by_an_operator_delivers_once_and_is_final() -> None:
    bench = Bench()
    half = bench.park("A")
    response = bench.settle("A", COMMIT)
    assert (response.code, response.ext_fields["state"]) == (0, "committed")
    assert response.ext_fields["already"] == "false"
    assert bench.settle("A", COMMIT).ext_fields["already"] == "true"
    assert bodies(bench.store, "T") == [b"body of A"]
    assert bench.settle("A", ROLLBACK).code == ResponseCode.TRANSACTION_CONFLICT
    assert bench.end(half, ROLLBACK).code == ResponseCode.TRANSACTION_CONFLICT
    assert bench.end(half, COMMIT).code == 0
    assert bodies(bench.store, "T") == [b"body of A"]
    last = bench.history("A")["steps"][-1]
    assert (last["who"], last["reason"]) == ("operator ann", "because")


def test_an_operator_cannot_change_the_decision_of_a_producer() -> None:
    bench = Bench()
    bench.end(bench.park("A"), ROLLBACK)
    assert bench.settle("A", COMMIT).code == ResponseCode.TRANSACTION_CONFLICT
    assert bodies(bench.store, "T") == []


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 501, "a\x02b"])
def test_an_invalid_reason_is_refused(reason: str) -> None:
    bench = Bench()
    bench.park("A")
    assert bench.settle("A", COMMIT, reason).code == ResponseCode.INVALID_PARAMETER
    assert bench.ids() == ["A"]


def test_an_invalid_operator_name_is_refused() -> None:
    bench = Bench()
    bench.park("A")
    forged = "ann\x02ESCROW_OUTCOME\x01c"  # would add a property to the op
    assert bench.settle("A", ROLLBACK, by=forged).code == ResponseCode.INVALID_PARAMETER
    assert bench.settle("A", ROLLBACK, by="").code == 0
    assert bench.history("A")["steps"][-1]["who"] == f"operator {bench.channel.address}"


def test_an_invalid_verdict_is_refused() -> None:
    bench = Bench()
    bench.park("A")
    assert bench.settle("A", UNKNOWN).code == ResponseCode.INVALID_PARAMETER


def test_the_first_of_two_decisions_in_one_turn_wins() -> None:
    bench = Bench()
    bench.park("A")
    decisions = [
        SettleTransaction(transaction_id="A", commit_or_rollback=verdict, reason="r", operator="o")
        for verdict in (COMMIT, ROLLBACK)
    ]
    requests = [new_request(RequestCode.SETTLE_TRANSACTION, fields) for fields in decisions]
    codes = sorted(response.code for response in bench.turn(*requests, at_ms=bench.now_ms))
    assert codes == [ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY]
    assert bodies(bench.store, "T") == [b"body of A"]


def test_a_decision_without_disk_space_changes_nothing() -> None:
    bench = Bench()
    bench.park("A")
    bench.store.has_disk_space = False
    assert bench.settle("A", COMMIT).code != 0
    bench.store.has_disk_space = True
    assert bench.history("A")["transaction"]["state"] == "open"
    assert bench.settle("A", ROLLBACK).code == 0


# --- resuming ------------------------------------------------------------------------------------


def test_a_resumed_transaction_is_checked_again() -> None:
    bench = Bench()
    half = bench.park("A")
    assert bench.resume("A").code == ResponseCode.INVALID_PARAMETER
    bench.strand()
    assert bench.history("A")["transaction"]["state"] == "stranded"
    assert "nextDue" not in bench.history("A")["transaction"]
    check_count = len(bench.channel.oneway_requests)
    assert bench.resume("A").code == 0
    bench.advance(200)
    assert len(bench.channel.oneway_requests) == check_count + 1
    history = bench.history("A")
    assert history["transaction"]["state"] == "open"
    assert [step["what"] for step in history["steps"]] == [
        *("parked", "asked", "asked", "stranded"),
        *("resumed", "appended_again", "asked"),
    ]
    resumed = history["steps"][4]
    assert (resumed["who"], resumed["reason"]) == ("operator ann", "try again")
    assert bench.end(half, COMMIT).code == 0
    assert bodies(bench.store, "T") == [b"body of A"]
    assert bench.steps("A")[-1] == "committed"
    assert bench.resume("A").code == ResponseCode.INVALID_PARAMETER


def test_rocketmqs_own_request_resumes_by_the_id_of_the_stranded_message() -> None:
    bench = Bench()
    bench.park("A")
    bench.strand()
    [record] = stored_records(bench.store, names.STRANDED_TOPIC)
    fields = ResumeCheckHalfMessage(msg_id=encode_offset_id(HOST, record.log_offset))
    assert bench.request(RequestCode.RESUME_CHECK_HALF_MESSAGE, fields).code == 0
    assert bench.ids(state="open") == ["A"]


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "crashed"])
def test_a_resumed_transaction_stays_resumed_after_a_restart(is_stopped: bool) -> None:
    bench = Bench()
    bench.park("A")
    bench.strand()
    bench.resume("A")
    before = bench.steps("A")
    restarted = bench.restarted(is_stopped=is_stopped)
    assert restarted.steps("A") == before
    assert restarted.ids(state="open") == ["A"]
    assert restarted.settle("A", COMMIT).code == 0
    assert bodies(restarted.store, "T") == [b"body of A"]
