"""Clients choose transaction ids: an operator's request that could mean several is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    ListTransactions,
    ResumeTransaction,
    SettleTransaction,
    TransactionHeader,
)
from escrowmq.store.key_index import RESULTS_MAX
from tests.interop.remoting import Response
from tests.support.broker_requests import new_request
from tests.support.escrows import COMMIT, ESCROW, ROLLBACK, EscrowBench, HalfPosition

REQUESTS = {
    "show": (RequestCode.SHOW_TRANSACTION, TransactionHeader, {}),
    "commit": (
        RequestCode.SETTLE_TRANSACTION,
        SettleTransaction,
        {"commit_or_rollback": COMMIT, "reason": "it is paid"},
    ),
    "roll back": (
        RequestCode.SETTLE_TRANSACTION,
        SettleTransaction,
        {"commit_or_rollback": ROLLBACK, "reason": "it is not paid"},
    ),
    "resume": (RequestCode.RESUME_TRANSACTION, ResumeTransaction, {}),
}


def ask(bench: EscrowBench, name: str, transaction_id: str, **precision: Any) -> Response:
    code, header, fields = REQUESTS[name]
    return bench.request(
        new_request(code, header(transaction_id=transaction_id, **fields, **precision))
    )


def bench_with_two(**strangers: Any) -> tuple[EscrowBench, HalfPosition, HalfPosition]:
    """Return a broker with the half of a stranger, which came first, and the real one."""
    bench = EscrowBench()
    foreign = bench.park("k", body=b"forged", **{"group": "strangers", **strangers})
    return bench, bench.park("k", body=b"real"), foreign


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(
    "strangers", [{"group": "strangers"}, {"group": "p", "topic": "U"}], ids=["group", "topic"]
)
def test_an_ambiguous_id_is_refused_with_the_candidates(
    name: str, strangers: dict[str, Any]
) -> None:
    bench = EscrowBench()
    foreign = bench.park("k", body=b"forged", **strangers)
    real = bench.park("k", body=b"real")
    assert real != foreign
    response = ask(bench, name, "k")
    assert response.code == ResponseCode.TRANSACTION_AMBIGUOUS
    for text in (strangers["group"], "half offset 0", "half offset 1", "'T'"):
        assert text in response.remark
    assert [bench.state_in_memory(position) for position in (foreign, real)] == ["open", "open"]
    assert bench.bodies() == []


def test_the_group_says_which_one_is_meant() -> None:
    bench, real, foreign = bench_with_two()
    assert ask(bench, "commit", "k", producer_group="p").code == 0
    assert bench.bodies() == [b"real"]
    assert bench.state_in_memory(foreign) == "open"
    assert bench.state(real) == "committed"
    assert ask(bench, "commit", "k", producer_group="nobody").code == ResponseCode.QUERY_NOT_FOUND


def test_the_position_says_which_one_is_meant() -> None:
    bench, real, foreign = bench_with_two(group="p", topic="U")
    assert ask(bench, "commit", "k", half_offset=real.queue_offset).code == 0
    assert bench.bodies() == [b"real"]
    assert bench.state_in_memory(foreign) == "open"
    assert ask(bench, "commit", "k", half_offset=77).code == ResponseCode.QUERY_NOT_FOUND


def test_an_id_is_ambiguous_although_one_of_them_is_decided() -> None:
    bench, _, foreign = bench_with_two()
    assert bench.end(foreign, ROLLBACK, group="strangers").code == 0
    assert ask(bench, "commit", "k").code == ResponseCode.TRANSACTION_AMBIGUOUS
    assert ask(bench, "commit", "k", producer_group="p").code == 0
    assert bench.bodies() == [b"real"]


def test_a_flood_of_halves_with_one_id_does_not_hide_the_real_one() -> None:
    bench = EscrowBench()
    real = bench.park("k", body=b"real")
    for number in range(RESULTS_MAX + 5):
        bench.park("k", body=b"forged", group=f"strangers-{number}")
    assert ask(bench, "commit", "k").code == ResponseCode.TRANSACTION_AMBIGUOUS
    assert ask(bench, "commit", "k", producer_group="p").code == 0
    assert bench.state(real) == "committed"
    assert bench.bodies() == [b"real"]


def test_a_moved_half_is_found_by_any_of_its_positions() -> None:
    bench, real, _ = bench_with_two()
    half = bench.coordinator.find_open(*real)
    assert half is not None
    bench.broker.transactions.move_half(half, bench.now_ms, is_resume=False)
    bench.turn()
    response = ask(bench, "commit", "k", half_offset=real.queue_offset)
    assert response.code == 0, response.remark
    assert bench.bodies() == [b"real"]


@pytest.mark.parametrize("state", ["open", "committed"])
def test_a_list_has_every_transaction_with_one_id(state: str) -> None:
    bench, real, foreign = bench_with_two()
    if state == "committed":
        bench.end(real, COMMIT)
        bench.end(foreign, COMMIT, group="strangers")
    request = new_request(RequestCode.LIST_TRANSACTIONS, ListTransactions(state=state))
    entries = json.loads(bench.request(request).body)["transactions"]
    assert sorted(entry["group"] for entry in entries) == ["p", "strangers"]


def test_the_history_of_one_has_no_step_of_the_other() -> None:
    bench, real, foreign = bench_with_two(group="p", topic="U")
    bench.tick(ESCROW.immunity_ms)
    bench.end(foreign, ROLLBACK)
    response = ask(bench, "show", "k", half_offset=real.queue_offset)
    steps = [step["what"] for step in json.loads(response.body)["steps"]]
    assert steps == ["parked", "asked"]


def test_a_repeated_send_for_another_topic_is_another_transaction() -> None:
    bench = EscrowBench()
    first = bench.park("k")
    bench.park("other", topic="U")  # creates the topic
    second = bench.park("k", topic="U")
    assert second != first
    assert bench.park("k") == first
    assert bench.end(first, ROLLBACK).code == 0
    assert bench.end(second, COMMIT).code == 0
    assert bench.park("k", topic="U") == second
    assert bench.bodies("U") == [b"k"]
