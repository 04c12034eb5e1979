"""Transactions of all brokers of a cluster; one that fails does not hide those of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import BrokerPlace, Caller, Reply, reason_of
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.remoting.bodies import (
    TransactionEntry,
    TransactionList,
    TransactionStory,
    decode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    Header,
    ListTransactions,
    SettleTransactionAnswer,
    TransactionName,
    decode_header,
)


@dataclass(frozen=True, slots=True)
class Listed:
    broker: BrokerPlace
    entry: TransactionEntry


@dataclass(frozen=True, slots=True)
class Told:
    broker: BrokerPlace
    story: TransactionStory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request to change something."""

    target: Listed
    state: str = ""
    already: bool = False
    error: str = ""


class Cluster(Brokers):
    # --- looking ---------------------------------------------------------------------------------

    def entries(self, filters: Sequence[ListTransactions]) -> Iterator[Listed]:
        """What any of the filters finds, broker by broker."""
        for broker in self.brokers:
            try:
                with Caller(broker.address) as caller:
                    for wanted in filters:
                        for entry in _entries(caller, wanted):
                            yield Listed(broker, entry)
            except EscrowError as error:
                self.note(broker, error)

    def stories(self, name: str) -> list[Told]:
        """More than one if a send was repeated at another broker."""
        found = []
        for broker in self.brokers:
            try:
                with Caller(broker.address) as caller:
                    body = caller.call(
                        RequestCode.SHOW_TRANSACTION, TransactionName(transaction_id=name)
                    ).body
                found.append(Told(broker, decode_body(TransactionStory, body)))
            except RequestRefused as error:
                if error.code != ResponseCode.QUERY_NOT_FOUND:
                    self.note(broker, error)
            except EscrowError as error:
                self.note(broker, error)
        return found

    # --- changing --------------------------------------------------------------------------------

    def change(
        self, code: int, state: str, targets: Sequence[tuple[Listed, Header]]
    ) -> Iterator[Outcome]:
        """`state`: what it is afterwards, if the answer does not say. In the order of brokers."""
        for broker in self.brokers:
            mine = [target for target in targets if target[0].broker == broker]
            done = 0
            try:
                if mine:
                    with Caller(broker.address) as caller:
                        replies = caller.call_many(code, (fields for _, fields in mine))
                        for (listed, _), reply in zip(mine, replies, strict=True):
                            yield _outcome(listed, reply, state)
                            done += 1
            except EscrowError as error:
                why = f"{reason_of(error)}; look at it again before you repeat it"
                for listed, _ in mine[done:]:
                    yield Outcome(listed, error=why)


def _entries(caller: Caller, wanted: ListTransactions) -> Iterator[TransactionEntry]:
    seen: set[str] = set()  # of settled ones: older copies come in later pages
    while True:
        body = caller.call(RequestCode.LIST_TRANSACTIONS, wanted).body
        page = decode_body(TransactionList, body)
        for entry in page.transactions:
            if entry.state in ("open", "stranded"):
                yield entry
            elif entry.transaction_id not in seen:
                seen.add(entry.transaction_id)
                yield entry
        if not page.more:
            return
        wanted = msgspec.structs.replace(wanted, after=page.next_after)


def _outcome(listed: Listed, reply: Reply | RequestRefused, state: str) -> Outcome:
    if isinstance(reply, RequestRefused):
        return Outcome(listed, error=reply.remark)
    if "state" not in reply.ext_fields:
        return Outcome(listed, state)
    answer = decode_header(SettleTransactionAnswer, reply.ext_fields)
    return Outcome(listed, answer.state, answer.already)
