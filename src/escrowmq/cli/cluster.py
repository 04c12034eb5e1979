"""Transactions of all brokers of a cluster; one that fails does not hide those of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from escrowmq.cli.brokers import Cluster
from escrowmq.cli.call import BrokerAddress, SyncConnection, SyncReply, error_text
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.remoting.bodies import (
    TransactionEntry,
    TransactionHistory,
    TransactionList,
    decode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    Header,
    ListTransactions,
    SettleTransactionResponse,
    TransactionHeader,
    decode_header,
)


@dataclass(frozen=True, slots=True)
class TransactionListing:
    broker: BrokerAddress
    entry: TransactionEntry


@dataclass(frozen=True, slots=True)
class TransactionView:
    broker: BrokerAddress
    history: TransactionHistory


@dataclass(frozen=True, slots=True)
class DecisionResult:
    """What became of one request to change something."""

    listing: TransactionListing
    state: str = ""
    was_already_decided: bool = False
    error: str = ""


class ClusterTransactions(Cluster):
    # --- looking ---------------------------------------------------------------------------------

    def list_transactions(
        self, filters: Sequence[ListTransactions]
    ) -> Iterator[TransactionListing]:
        """What any of the filters finds, broker by broker."""
        for broker in self.brokers:
            try:
                with SyncConnection(broker.address) as caller:
                    for wanted in filters:
                        for entry in _entries(caller, wanted):
                            yield TransactionListing(broker, entry)
            except EscrowError as error:
                self.report_failure(broker, error)

    def histories(self, transaction_id: str) -> list[TransactionView]:
        """More than one if a send was repeated at another broker."""
        found = []
        for broker in self.brokers:
            try:
                with SyncConnection(broker.address) as caller:
                    body = caller.call(
                        RequestCode.SHOW_TRANSACTION,
                        TransactionHeader(transaction_id=transaction_id),
                    ).body
                found.append(TransactionView(broker, decode_body(TransactionHistory, body)))
            except RequestRefused as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    self.report_failure(broker, error)
            except EscrowError as error:
                self.report_failure(broker, error)
        return found

    # --- changing --------------------------------------------------------------------------------

    def apply(
        self, code: int, state: str, targets: Sequence[tuple[TransactionListing, Header]]
    ) -> Iterator[DecisionResult]:
        """`state`: what it is afterwards, if the answer does not say. In the order of brokers."""
        for broker in self.brokers:
            mine = [target for target in targets if target[0].broker == broker]
            done = 0
            try:
                if mine:
                    with SyncConnection(broker.address) as caller:
                        replies = caller.call_many(code, (fields for _, fields in mine))
                        for (listed, _), reply in zip(mine, replies, strict=True):
                            yield _decision_result(listed, reply, state)
                            done += 1
            except EscrowError as error:
                why = f"{error_text(error)}; look at it again before you repeat it"
                for listed, _ in mine[done:]:
                    yield DecisionResult(listed, error=why)


def _entries(connection: SyncConnection, request: ListTransactions) -> Iterator[TransactionEntry]:
    seen: set[str] = set()  # of settled ones: older copies come in later pages
    while True:
        body = connection.call(RequestCode.LIST_TRANSACTIONS, request).body
        page = decode_body(TransactionList, body)
        for entry in page.transactions:
            if entry.state in ("open", "stranded"):
                yield entry
            elif entry.transaction_id not in seen:
                seen.add(entry.transaction_id)
                yield entry
        if not page.more:
            return
        request = msgspec.structs.replace(request, after=page.next_after)


def _decision_result(
    listing: TransactionListing, reply: SyncReply | RequestRefused, state: str
) -> DecisionResult:
    if isinstance(reply, RequestRefused):
        return DecisionResult(listing, error=reply.remark)
    if "state" not in reply.ext_fields:
        return DecisionResult(listing, state)
    answer = decode_header(SettleTransactionResponse, reply.ext_fields)
    return DecisionResult(listing, answer.state, answer.already)
