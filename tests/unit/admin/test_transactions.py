"""Transactions of a cluster: listing them page by page, and deciding many of them."""

from __future__ import annotations

from typing import Any

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.transactions import (
    DecisionResult,
    TransactionListing,
    decide_transactions,
    list_transactions,
    transaction_histories,
)
from escrowmq.remoting.bodies import TransactionEntry, TransactionList, encode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    Header,
    ListTransactions,
    SettleTransaction,
    SettleTransactionResponse,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_broker import ScriptedBroker


def entry(transaction_id: str, state: str = "open") -> TransactionEntry:
    return TransactionEntry(
        transaction_id=transaction_id,
        group="pay",
        topic="orders",
        queue_id=0,
        state=state,
        parked_at=0,
        checks=0,
        queue_offset=0,
        log_offset=0,
        size=100,
    )


def pages(*contents: list[TransactionEntry]) -> Any:
    """Return a responder that sends one of these pages for each request."""

    def respond(request: Request[Any]) -> bytes:
        number = max(0, request.head.fields.after)
        has_more = number + 1 < len(contents)
        page = TransactionList(
            transactions=contents[number],
            more=has_more,
            next_after=number + 1 if has_more else -1,
        )
        return encode_response(request, body=encode_body(page))

    return respond


def listed_ids(cluster: Cluster, state: str | None = None) -> list[str]:
    listings = list_transactions(cluster, [ListTransactions(state=state)])
    return [listing.entry.transaction_id for listing in listings]


def test_a_list_is_read_page_by_page() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.LIST_TRANSACTIONS] = pages(
            [entry("A"), entry("B")], [entry("C")]
        )
        assert listed_ids(cluster) == ["A", "B", "C"]


def test_a_decided_transaction_whose_half_was_moved_is_listed_once() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.LIST_TRANSACTIONS] = pages(
            [entry("A", "committed"), entry("B", "committed")], [entry("A", "committed")]
        )
        assert listed_ids(cluster, "committed") == ["A", "B"]


def test_a_broker_that_does_not_support_the_request_is_a_failure() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.LIST_TRANSACTIONS] = lambda request: encode_response(
            request, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        )
        assert listed_ids(cluster) == []
        [failure] = cluster.failures
        assert "does not support LIST_TRANSACTIONS" in str(failure)


def test_a_transaction_that_a_broker_does_not_have_is_no_failure() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.SHOW_TRANSACTION] = lambda request: encode_response(
            request, code=ResponseCode.QUERY_NOT_FOUND, remark="none"
        )
        assert transaction_histories(cluster, "A") == []
        assert cluster.failures == []


def settle(cluster: Cluster, *transaction_ids: str) -> list[DecisionResult]:
    [broker] = cluster.brokers()
    targets: list[tuple[TransactionListing, Header]] = [
        (
            TransactionListing(BrokerAddress(*broker), entry(transaction_id)),
            SettleTransaction(transaction_id=transaction_id, commit_or_rollback=8, reason="r"),
        )
        for transaction_id in transaction_ids
    ]
    code = RequestCode.SETTLE_TRANSACTION
    return list(decide_transactions(cluster, code, "committed", targets))


def test_each_decision_has_its_own_result() -> None:
    def respond(request: Request[Any]) -> bytes:
        transaction_id = request.head.fields.transaction_id
        if transaction_id == "B":
            return encode_response(request, code=3701, remark="B is rolled back")
        header = SettleTransactionResponse(
            transaction_id=transaction_id, state="committed", already=transaction_id == "C"
        )
        return encode_response(request, header)

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.SETTLE_TRANSACTION] = respond
        results = settle(cluster, "A", "B", "C")
    assert [(result.state, result.was_already_decided, result.error) for result in results] == [
        ("committed", False, ""),
        ("", False, "B is rolled back"),
        ("committed", True, ""),
    ]


def test_a_connection_that_breaks_leaves_the_remaining_decisions_unknown() -> None:
    def respond(request: Request[Any]) -> bytes | None:
        if request.head.fields.transaction_id == "B":
            return None
        header = SettleTransactionResponse(transaction_id="A", state="committed")
        return encode_response(request, header)

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.SETTLE_TRANSACTION] = respond
        results = settle(cluster, "A", "B", "C")
    assert [result.state for result in results] == ["committed", "", ""]
    assert all("look at the transaction again" in result.error for result in results[1:])
