"""Transactions as operators see them: lists, histories, decisions by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.broker.transactions.admin import PAGE_ENTRIES_MAX
from escrowmq.config import Config, StoreConfig, TransactionConfig
from escrowmq.message import names
from escrowmq.message.keys import UniqueKeyGenerator, encode_offset_id
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    EndTransaction,
    Header,
    ListTransactions,
    ResumeCheckHalfMessage,
    ResumeTransaction,
    SettleTransaction,
    TransactionHeader,
)
from escrowmq.testing.disks import MemoryDisk
from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, Response
from tests.support.broker_requests import FakeChannel, a_send, ask, bodies, stored
from tests.support.stores import HOST, NOW_MS, open_store

SETTINGS = StoreConfig(
    segment_bytes=64 << 10, queue_file_bytes=2000, index_slots=101, index_entries=400
)
IMMUNITY_MS, INTERVAL_MS, CHECKS_MAX = 6_000, 30_000, 2


class Bench:
    def __init__(self, disk: MemoryDisk | None = None, now_ms: int = NOW_MS) -> None:
        self.disk = disk or MemoryDisk()
        self.store = open_store(self.disk, SETTINGS)
        config = TransactionConfig(
            immunity_ms=IMMUNITY_MS, check_interval_ms=INTERVAL_MS, checks_max=CHECKS_MAX
        )
        self.broker = Broker(
            self.disk,
            self.store,
            Config(store=SETTINGS, transaction=config),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
        )
        self.channel = FakeChannel()
        self.now_ms = now_ms

    def ask(self, code: int, fields: Header) -> Response:
        self.broker.handle(self.channel, ask(code, fields), self.now_ms)
        self.broker.end_turn(self.now_ms)
        return self.channel.answer()

    def park(self, key: str, *, topic: str = "T", group: str = "p", more: str = "") -> Response:
        properties = f"UNIQ_KEY\x01{key}\x02TRAN_MSG\x01true\x02PGROUP\x01{group}\x02{more}"
        request = a_send(topic, b"body of " + key.encode(), properties=properties, sys_flag=4)
        self.broker.handle(self.channel, request, self.now_ms)
        self.broker.end_turn(self.now_ms)
        return self.channel.answer()

    def advance(self, ms: int) -> None:
        """Let time pass, and tick."""
        self.now_ms += ms
        for _ in range(2):
            self.broker.tick(self.now_ms)
            self.broker.end_turn(self.now_ms)

    def end(
        self, sent: Response, verdict: int, *, group: str = "p", check: bool = False
    ) -> Response:
        fields = EndTransaction(
            producer_group=group,
            tran_state_table_offset=int(sent.ext_fields["queueOffset"]),
            commit_log_offset=int(sent.ext_fields["msgId"][-16:], 16),
            commit_or_rollback=verdict,
            from_transaction_check=check,
        )
        return self.ask(RequestCode.END_TRANSACTION, fields)

    def page(self, **filters: Any) -> Any:
        answer = self.ask(RequestCode.LIST_TRANSACTIONS, ListTransactions(**filters))
        assert answer.code == 0, answer.remark
        return json.loads(answer.body)

    def ids(self, **filters: Any) -> list[str]:
        found = []
        page = self.page(**filters)
        while True:
            found += [entry["transactionId"] for entry in page["transactions"]]
            if not page["more"]:
                return found
            page = self.page(**{**filters, "after": page["nextAfter"]})

    def history(self, name: str) -> Any:
        answer = self.ask(RequestCode.SHOW_TRANSACTION, TransactionHeader(transaction_id=name))
        assert answer.code == 0, answer.remark
        return json.loads(answer.body)

    def steps(self, name: str) -> list[str]:
        return [step["what"] for step in self.history(name)["steps"]]

    def settle(self, name: str, verdict: int, reason: str = "because", by: str = "ann") -> Response:
        fields = SettleTransaction(
            transaction_id=name, commit_or_rollback=verdict, reason=reason, operator=by
        )
        return self.ask(RequestCode.SETTLE_TRANSACTION, fields)

    def resume(self, name: str) -> Response:
        fields = ResumeTransaction(transaction_id=name, reason="try again", operator="ann")
        return self.ask(RequestCode.RESUME_TRANSACTION, fields)

    def strand(self) -> None:
        self.advance(IMMUNITY_MS)
        for _ in range(CHECKS_MAX):
            self.advance(INTERVAL_MS)

    def restarted(self, *, in_order: bool) -> Bench:
        if in_order:
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
    sent = {key: bench.park(key) for key in keys}
    for key in keys[::3]:
        bench.end(sent[key], COMMIT)
    left = [key for at, key in enumerate(keys) if at % 3]
    for count_max in (1, 2, 5, 100):
        assert bench.ids(count_max=count_max) == left


def test_a_page_scans_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.broker.transactions.admin.PAGE_SCANNED_MAX", 4)
    bench = Bench()
    for number in range(10):
        bench.park(f"K{number}", topic="wanted" if number == 9 else "T")
    first = bench.page(topic="wanted")
    assert (first["transactions"], first["more"]) == ([], True)
    assert bench.ids(topic="wanted") == ["K9"]


def test_a_page_never_exceeds_its_limit() -> None:
    bench = Bench()
    for number in range(3):
        bench.park(f"K{number}")
    assert len(bench.page(count_max=PAGE_ENTRIES_MAX + 1)["transactions"]) == 3
    answer = bench.ask(RequestCode.LIST_TRANSACTIONS, ListTransactions(count_max=0))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    answer = bench.ask(RequestCode.LIST_TRANSACTIONS, ListTransactions(state="lost"))
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_decided_transactions_are_listed_newest_first() -> None:
    bench = Bench()
    for number in range(40):
        sent = bench.park(f"K{number:02d}", topic="T" if number % 4 else "U")
        bench.end(sent, ROLLBACK if number % 2 else COMMIT)
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
    sent = bench.park("A")
    bench.advance(IMMUNITY_MS)
    assert "has not been answered" in bench.history("A")["pendingBecause"]
    bench.now_ms += 10
    bench.end(sent, UNKNOWN, check=True)
    history = bench.history("A")
    assert "was answered with UNKNOWN" in history["pendingBecause"]
    assert history["transaction"]["nextDue"] == NOW_MS + IMMUNITY_MS + INTERVAL_MS
    parked, asked, unknown = history["steps"]
    assert (parked["what"], parked["at"]) == ("parked", NOW_MS)
    assert (asked["what"], asked["at"], asked["who"], asked["detail"]) == (
        *("asked", NOW_MS + IMMUNITY_MS),
        *(bench.channel.address, "check 1"),
    )
    assert (unknown["what"], unknown["at"]) == ("unknown", NOW_MS + IMMUNITY_MS + 10)
    bench.end(sent, COMMIT, check=True)
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


@pytest.mark.parametrize("in_order", [True, False], ids=["stopped", "crashed"])
def test_histories_survive_a_restart(in_order: bool) -> None:
    bench = Bench()
    committed, rolled_back, asked = bench.park("C"), bench.park("R"), bench.park("A")
    bench.park("S")
    bench.park("H")
    bench.end(committed, COMMIT)
    bench.end(rolled_back, ROLLBACK)
    bench.advance(IMMUNITY_MS)
    bench.end(asked, UNKNOWN, check=True)
    bench.settle("H", ROLLBACK, "customer called")
    bench.advance(INTERVAL_MS)
    bench.settle("A", COMMIT, "the order is in the books")
    bench.advance(INTERVAL_MS)
    keys = ["C", "R", "A", "S", "H"]
    before = [bench.history(key) for key in keys]
    assert before[2]["steps"][-1]["reason"] == "the order is in the books"
    again = bench.restarted(in_order=in_order)
    after = [again.history(key) for key in keys]
    for history in (*before, *after):
        history["transaction"].pop("why", None)
    assert after == before
    assert again.steps("S") == ["parked", "asked", "asked", "stranded"]
    assert "checked 2 times" in again.history("S")["pendingBecause"]
    assert again.ids(checks_min=2) == ["S"]


def test_the_history_of_a_delayed_transaction_says_that_it_waits() -> None:
    bench = Bench()
    bench.park("A", more="DELAY\x012\x02")
    bench.settle("A", COMMIT)
    last = bench.history("A")["steps"][-1]
    assert (last["what"], last["who"]) == ("committed", "operator ann")
    assert last["detail"] == "will be delivered to queue 0 of topic T after its delay"


def test_an_unknown_transaction_is_not_found() -> None:
    bench = Bench()
    bench.park("A")
    for name in ("B", "", "zz", "00" * 16, encode_offset_id(HOST, 1 << 40)):
        answer = bench.ask(RequestCode.SHOW_TRANSACTION, TransactionHeader(transaction_id=name))
        assert answer.code == ResponseCode.QUERY_NOT_FOUND


def test_an_offset_id_names_a_transaction_too() -> None:
    bench = Bench()
    offset_id = bench.park("A").ext_fields["msgId"]
    assert bench.history(offset_id)["transaction"]["transactionId"] == "A"
    bench.settle(offset_id, ROLLBACK)
    assert bench.history(offset_id)["transaction"]["state"] == "rolled_back"


# --- decisions by hand ---------------------------------------------------------------------------


def test_a_commit_by_an_operator_delivers_once_and_is_final() -> None:
    bench = Bench()
    sent = bench.park("A")
    answer = bench.settle("A", COMMIT)
    assert (answer.code, answer.ext_fields["state"]) == (0, "committed")
    assert answer.ext_fields["already"] == "false"
    assert bench.settle("A", COMMIT).ext_fields["already"] == "true"
    assert bodies(bench.store, "T") == [b"body of A"]
    assert bench.settle("A", ROLLBACK).code == ResponseCode.TRANSACTION_CONFLICT
    assert bench.end(sent, ROLLBACK).code == ResponseCode.TRANSACTION_CONFLICT
    assert bench.end(sent, COMMIT).code == 0
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
    odd = "ann\x02ESCROW_OUTCOME\x01c"
    assert bench.settle("A", ROLLBACK, by=odd).code == ResponseCode.INVALID_PARAMETER
    assert bench.settle("A", ROLLBACK, by="").code == 0
    assert bench.history("A")["steps"][-1]["who"] == f"operator {bench.channel.address}"


def test_an_invalid_verdict_is_refused() -> None:
    bench = Bench()
    bench.park("A")
    assert bench.settle("A", UNKNOWN).code == ResponseCode.INVALID_PARAMETER


def test_the_first_of_two_decisions_in_one_turn_wins() -> None:
    bench = Bench()
    bench.park("A")
    for verdict in (COMMIT, ROLLBACK):
        fields = SettleTransaction(
            transaction_id="A", commit_or_rollback=verdict, reason="r", operator="o"
        )
        bench.broker.handle(
            bench.channel, ask(RequestCode.SETTLE_TRANSACTION, fields), bench.now_ms
        )
    bench.broker.end_turn(bench.now_ms)
    codes = sorted(answer.code for answer in bench.channel.answers())
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
    sent = bench.park("A")
    assert bench.resume("A").code == ResponseCode.INVALID_PARAMETER
    bench.strand()
    assert bench.history("A")["transaction"]["state"] == "stranded"
    assert "nextDue" not in bench.history("A")["transaction"]
    asked = len(bench.channel.oneway_requests)
    assert bench.resume("A").code == 0
    bench.advance(200)
    assert len(bench.channel.oneway_requests) == asked + 1
    history = bench.history("A")
    assert history["transaction"]["state"] == "open"
    assert [step["what"] for step in history["steps"]] == [
        *("parked", "asked", "asked", "stranded"),
        *("resumed", "appended_again", "asked"),
    ]
    resumed = history["steps"][4]
    assert (resumed["who"], resumed["reason"]) == ("operator ann", "try again")
    assert bench.end(sent, COMMIT).code == 0
    assert bodies(bench.store, "T") == [b"body of A"]
    assert bench.steps("A")[-1] == "committed"
    assert bench.resume("A").code == ResponseCode.INVALID_PARAMETER


def test_rocketmqs_own_request_resumes_by_the_id_of_the_stranded_message() -> None:
    bench = Bench()
    bench.park("A")
    bench.strand()
    [record] = stored(bench.store, names.STRANDED_TOPIC)
    fields = ResumeCheckHalfMessage(msg_id=encode_offset_id(HOST, record.log_offset))
    assert bench.ask(RequestCode.RESUME_CHECK_HALF_MESSAGE, fields).code == 0
    assert bench.ids(state="open") == ["A"]


@pytest.mark.parametrize("in_order", [True, False], ids=["stopped", "crashed"])
def test_a_resumed_transaction_stays_resumed_after_a_restart(in_order: bool) -> None:
    bench = Bench()
    bench.park("A")
    bench.strand()
    bench.resume("A")
    before = bench.steps("A")
    again = bench.restarted(in_order=in_order)
    assert again.steps("A") == before
    assert again.ids(state="open") == ["A"]
    assert again.settle("A", COMMIT).code == 0
    assert bodies(again.store, "T") == [b"body of A"]
