"""List and explain the transactions of a cluster, and decide them by hand.

Only EscrowMQ's brokers have these requests; a RocketMQ broker is reported as a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from escrowmq.admin.cluster import BrokerAddress, Cluster, error_text
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection
from escrowmq.errors import AmbiguousTransaction, BrokenResponse, EscrowError, RequestRefused
from escrowmq.message import names
from escrowmq.remoting.bodies import (
    TransactionCursors,
    TransactionEntry,
    TransactionHistory,
    TransactionList,
    decode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import (
    Header,
    ListTransactions,
    QueryConsumerOffset,
    QueueHeader,
    SettleTransactionResponse,
    TransactionCursorsHeader,
    TransactionHeader,
    decode_header,
)

_EMPTY_PAGES_MAX: Final = 10_000  # one after the other: a broker reads its log in pieces


@dataclass(frozen=True, slots=True)
class TransactionListing:
    """A transaction of a list, and the broker that has it."""

    broker: BrokerAddress
    entry: TransactionEntry


@dataclass(frozen=True, slots=True)
class TransactionView:
    """The history of one transaction on one broker."""

    broker: BrokerAddress
    history: TransactionHistory


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """The result of one request to decide or resume a transaction: a state, or an error."""

    listing: TransactionListing
    state: str = ""
    was_already_decided: bool = False
    error: str = ""


def list_transactions(
    cluster: Cluster, filters: Sequence[ListTransactions]
) -> Iterator[TransactionListing]:
    """Yield the transactions that match any of the filters, broker by broker, page by page.

    Brokers that fail are listed in `cluster.failures`.
    """
    for broker in cluster.brokers():
        try:
            connection = cluster.connection(broker.address)
            for request in filters:
                for entry in _list_on_broker(connection, request):
                    yield TransactionListing(broker, entry)
        except EscrowError as error:
            cluster.report_failure(broker, error)


def transaction_histories(
    cluster: Cluster,
    transaction_id: str,
    *,
    group: str | None = None,
    half_offset: int | None = None,
) -> list[TransactionView]:
    """Return the history of a transaction from each broker that has it.

    More than one broker has it if the send was repeated on another broker. Clients choose ids, so
    several transactions of one broker may have the same: `group` and `half_offset`, its offset in
    the half queue, say which one is meant. Raises AmbiguousTransaction if they do not.
    """

    def fetch(connection: SyncConnection) -> TransactionHistory:
        header = TransactionHeader(
            transaction_id=transaction_id, producer_group=group, half_offset=half_offset
        )
        body = connection.call(RequestCode.SHOW_TRANSACTION, header).body
        return decode_body(TransactionHistory, body)

    histories = cluster.ask_all(fetch, ignored_codes=(ResponseCode.QUERY_NOT_FOUND,))
    for failure in cluster.failures:
        error = failure.error
        if isinstance(error, RequestRefused) and error.code == ResponseCode.TRANSACTION_AMBIGUOUS:
            raise AmbiguousTransaction(f"{failure.broker.name}: {error.remark}")
    return [TransactionView(broker, history) for broker, history in histories]


def transaction_cursors(cluster: Cluster) -> list[tuple[BrokerAddress, TransactionCursors]]:
    """Return how far each broker is with its half and op queues.

    Works with RocketMQ brokers too: the cursors are the offsets of the group CID_RMQ_SYS_TRANS.
    """
    return cluster.ask_all(_fetch_cursors)


def _fetch_cursors(connection: SyncConnection) -> TransactionCursors:
    try:
        body = connection.call(RequestCode.TRANSACTION_CURSORS, TransactionCursorsHeader()).body
        return decode_body(TransactionCursors, body)
    except RequestRefused as error:
        if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise
    half_cursor, half_end = _cursor_and_end(connection, names.HALF_TOPIC)
    op_cursor, op_end = _cursor_and_end(connection, names.OP_TOPIC)
    return TransactionCursors(
        half_cursor=half_cursor, half_end=half_end, op_cursor=op_cursor, op_end=op_end
    )


def _cursor_and_end(connection: SyncConnection, topic: str) -> tuple[int, int]:
    header = QueryConsumerOffset(consumer_group=names.CURSOR_GROUP, topic=topic, queue_id=0)
    cursor = connection.call(RequestCode.QUERY_CONSUMER_OFFSET, header)
    end = connection.call(RequestCode.GET_MAX_OFFSET, QueueHeader(topic=topic, queue_id=0))
    return cursor.int_field("offset", minimum=-1), end.int_field("offset")


def decide_transactions(
    cluster: Cluster,
    code: RequestCode,
    state: str,
    targets: Sequence[tuple[TransactionListing, Header]],
) -> Iterator[DecisionResult]:
    """Send SETTLE_TRANSACTION or RESUME_TRANSACTION for each target, and yield the results.

    `state` is the state afterwards, for responses that do not name it. Results come broker by
    broker. If a connection breaks, its remaining targets get an error: they may have been decided.
    """
    for broker in cluster.brokers():
        pending = [target for target in targets if target[0].broker == broker]
        if not pending:
            continue
        done = 0
        try:
            connection = cluster.connection(broker.address)
            requests = (OutgoingRequest(code, header) for _, header in pending)
            replies = connection.call_many(requests)
            for (listing, _), reply in zip(pending, replies, strict=True):
                yield _decision_result(connection, code, listing, reply, state)
                done += 1
        except EscrowError as error:
            text = f"{error_text(error)}; look at the transaction again before you retry"
            for listing, _ in pending[done:]:
                yield DecisionResult(listing, error=text)


def _list_on_broker(
    connection: SyncConnection, request: ListTransactions
) -> Iterator[TransactionEntry]:
    # Decided transactions are read from the log, the newest first. A half that was moved is in the
    # log twice, and its older copy comes in a later page.
    seen: set[tuple[str, str, str]] = set()
    pages: set[int] = set()
    empty_pages = 0
    while True:
        body = connection.call(RequestCode.LIST_TRANSACTIONS, request).body
        page = decode_body(TransactionList, body)
        for entry in page.transactions:
            name = entry.group, entry.topic, entry.transaction_id
            if entry.state in ("open", "stranded"):
                yield entry
            elif name not in seen:
                seen.add(name)
                yield entry
        if not page.more:
            return
        # A broker that always says that there is more would never let the list end.
        empty_pages = 0 if page.transactions else empty_pages + 1
        if page.next_after in pages or empty_pages > _EMPTY_PAGES_MAX:
            raise BrokenResponse(f"{connection.address}: the list of transactions does not end")
        pages.add(page.next_after)
        request = msgspec.structs.replace(request, after=page.next_after)


def _decision_result(
    connection: SyncConnection,
    code: RequestCode,
    listing: TransactionListing,
    reply: Reply,
    state: str,
) -> DecisionResult:
    if reply.code:
        return DecisionResult(listing, error=connection.refusal(code, reply).remark)
    if "state" not in reply.ext_fields:
        return DecisionResult(listing, state)
    response = decode_header(SettleTransactionResponse, reply.ext_fields)
    return DecisionResult(listing, response.state, response.already)
