"""Assertions about what a broker has delivered and decided.

They read what any client may read, so they work with every EscrowMQ broker. They poll until the
broker has done what is expected, and no longer. A failure shows what was delivered, and the state
and the history of each transaction of the topic.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.messages import MAX_TIMESTAMP_MS, MessageTail, TailRequest, find_by_key
from escrowmq.admin.offsets import EARLIEST
from escrowmq.admin.transactions import list_transactions, transaction_histories
from escrowmq.client.messages import ReceivedMessage, SendResult, to_received_message
from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError, NoRoute, OutcomeUnknown
from escrowmq.message.names import HALF_TOPIC
from escrowmq.message.transaction import TransactionState
from escrowmq.parsing import format_timestamp
from escrowmq.remoting.bodies import TransactionEntry, TransactionHistory
from escrowmq.remoting.headers import ListTransactions, QueryMessage

TIMEOUT_S: Final = 30.0  # also on a busy machine
POLL_INTERVAL_S: Final = 0.02
SHOWN_MAX: Final = 20  # messages and transactions in the text of a failure
_KEY_RESULTS_MAX: Final = 100

T = TypeVar("T")
Predicate = Callable[[ReceivedMessage], object]


class SentTransaction(Protocol):
    """A transaction of a producer or of a database binding."""

    @property
    def halves(self) -> Sequence[SendResult]: ...


class BrokerAssertions:
    """Assertions about the brokers of a cluster, or about one of them.

    Each method blocks until the assertion holds. In a coroutine, await the one whose name ends with
    _async: a method that blocks would stop the event loop, and with it the code under test.

    `servers`: addresses of name servers.
    `address`: the address of a broker, to look at this one only.
    `timeout_s`: how long the assertions wait.
    """

    def __init__(self, servers: str, *, address: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self.servers = servers
        self.address = address
        self.timeout_s = timeout_s

    # --- what is there ---------------------------------------------------------------------------

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return the messages that consumers of a topic can read, in the order of storing."""
        with self._cluster() as cluster:
            return _TopicReader(cluster, topic).read()

    def transactions(self, topic: str = "") -> list[TransactionHistory]:
        """Return the transactions of a topic, or of all, decided or not, with their histories."""
        with self._cluster() as cluster:
            return _histories(cluster, topic)

    def open_transactions(self, topic: str = "") -> list[TransactionEntry]:
        """Return the transactions of a topic, or of all, that are not decided."""
        with self._cluster() as cluster:
            return _open_transactions(cluster, topic)

    # --- assertions ------------------------------------------------------------------------------

    def assert_delivered(
        self,
        topic: str,
        bodies: Sequence[bytes] | None = None,
        *,
        count: int | None = None,
        where: Predicate | None = None,
        timeout_s: float | None = None,
    ) -> list[ReceivedMessage]:
        """Wait until exactly the expected messages are in the topic, and return them.

        `bodies` are expected in any order; `count` is their number; without either, there has to be
        one message or more. `where` selects the messages that count. Fails at once if there are
        more than expected, and otherwise after `timeout_s`.
        """

        def look(cluster: Cluster) -> list[ReceivedMessage] | None:
            messages = [message for message in reader.read() if where is None or where(message)]
            if _is_more(messages, bodies, count):
                raise AssertionError(
                    _not_delivered_text(cluster, topic, bodies, count, reader.messages)
                )
            return messages if _is_all(messages, bodies, count) else None

        with self._cluster() as cluster:
            reader = _TopicReader(cluster, topic)
            return self._wait(
                lambda: look(cluster),
                lambda: _not_delivered_text(cluster, topic, bodies, count, reader.messages),
                timeout_s,
            )

    def assert_nothing_delivered(self, topic: str, *, timeout_s: float | None = None) -> None:
        """Wait until all transactions of the topic are decided; assert that it has no message."""
        with self._cluster() as cluster:
            reader = _TopicReader(cluster, topic)

            def look() -> bool | None:
                is_settled = not _open_transactions(cluster, topic)
                if reader.read():
                    raise AssertionError(
                        _not_delivered_text(cluster, topic, [], None, reader.messages)
                    )
                return is_settled or None

            self._wait(
                look,
                lambda: f"transactions of {topic!r} are not decided\n" + _text(cluster, topic),
                timeout_s,
            )

    def assert_settled(self, topic: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until every transaction of the topic, or of all topics, is decided."""
        with self._cluster() as cluster:
            self._wait(
                lambda: not _open_transactions(cluster, topic) or None,
                lambda: "transactions are not decided\n" + _text(cluster, topic),
                timeout_s,
            )

    def assert_rolled_back(
        self, transaction: SentTransaction | str, *, timeout_s: float | None = None
    ) -> None:
        """Wait until a transaction is rolled back. Fails at once if it is committed.

        It is a transaction with its halves, the id of a message, or a key of messages.
        """
        names = (
            [transaction]
            if isinstance(transaction, str)
            else [half.message_id for half in transaction.halves]
        )
        if not names:
            raise ValueError("the transaction has sent no message, so there is nothing to decide")

        with self._cluster() as cluster:
            histories: list[TransactionHistory] = []

            def look() -> bool | None:
                histories[:] = [history for name in names for history in _find(cluster, name)]
                states = {history.transaction.state for history in histories}
                if TransactionState.COMMITTED.text in states:
                    raise AssertionError(_not_rolled_back_text(names, histories))
                return states == {TransactionState.ROLLED_BACK.text} or None

            self._wait(look, lambda: _not_rolled_back_text(names, histories), timeout_s)

    def _cluster(self) -> Cluster:
        return Cluster(self.servers, broker=self.address or None)

    def _wait(
        self, look: Callable[[], T | None], failure_text: Callable[[], str], timeout_s: float | None
    ) -> T:
        return _wait(look, failure_text, self.timeout_s if timeout_s is None else timeout_s)

    # --- the same in a coroutine -----------------------------------------------------------------

    async def assert_delivered_async(
        self,
        topic: str,
        bodies: Sequence[bytes] | None = None,
        *,
        count: int | None = None,
        where: Predicate | None = None,
        timeout_s: float | None = None,
    ) -> list[ReceivedMessage]:
        """See `assert_delivered`. `where` is called in a thread."""
        return await asyncio.to_thread(
            self.assert_delivered, topic, bodies, count=count, where=where, timeout_s=timeout_s
        )

    async def assert_nothing_delivered_async(
        self, topic: str, *, timeout_s: float | None = None
    ) -> None:
        """See `assert_nothing_delivered`."""
        await asyncio.to_thread(self.assert_nothing_delivered, topic, timeout_s=timeout_s)

    async def assert_settled_async(
        self, topic: str = "", *, timeout_s: float | None = None
    ) -> None:
        """See `assert_settled`."""
        await asyncio.to_thread(self.assert_settled, topic, timeout_s=timeout_s)

    async def assert_rolled_back_async(
        self, transaction: SentTransaction | str, *, timeout_s: float | None = None
    ) -> None:
        """See `assert_rolled_back`."""
        await asyncio.to_thread(self.assert_rolled_back, transaction, timeout_s=timeout_s)


# --- polling -------------------------------------------------------------------------------------


def _wait(look: Callable[[], T | None], failure_text: Callable[[], str], timeout_s: float) -> T:
    """Return what `look` returns as soon as that is not None.

    A broker that does not answer may be restarting, so this is no failure before the timeout.
    """
    _refuse_event_loop()
    clock = SystemClock()
    deadline_s = clock.elapsed_s() + timeout_s
    while True:
        error = None
        try:
            result = look()
        except EscrowError as failure:
            result, error = None, failure
        if result is not None:
            return result
        if clock.elapsed_s() >= deadline_s:
            raise AssertionError(f"not within {timeout_s:g} s: {_describe(error, failure_text)}")
        threading.Event().wait(POLL_INTERVAL_S)


def _describe(error: EscrowError | None, failure_text: Callable[[], str]) -> str:
    try:
        text = failure_text()
    except EscrowError as failure:
        text, error = "", failure
    return text if error is None else f"the broker cannot be read: {error}\n{text}"


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "this assertion would stop the event loop while it waits; in a coroutine, await the method "
        "that ends in _async"
    )


# --- messages ------------------------------------------------------------------------------------


class _TopicReader:
    """Reads the messages of a topic, which need not exist yet."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._tail: MessageTail | None = None
        self.messages: list[ReceivedMessage] = []

    def read(self) -> list[ReceivedMessage]:
        """Read what is new, and return all messages. Raises EscrowError if a broker fails."""
        if self._tail is None:
            # A tail that has not found its topic would look again only some seconds later.
            tail = MessageTail(self._cluster, TailRequest(self._topic, EARLIEST))
            try:
                views = tail.poll()
            except NoRoute:
                return self.messages
            _require_answers(self._cluster)
            self._tail = tail
        else:
            views = self._tail.poll()
        while views:
            self.messages += [to_received_message(view.record, view.broker) for view in views]
            views = self._tail.poll()
        _require_answers(self._cluster)
        return self.messages


def _require_answers(cluster: Cluster) -> None:
    """Raise the error of a broker that could not be read."""
    if cluster.failures:
        failure = cluster.failures[0]
        cluster.failures.clear()
        raise OutcomeUnknown(str(failure))


def _is_all(
    messages: Sequence[ReceivedMessage], bodies: Sequence[bytes] | None, count: int | None
) -> bool:
    if bodies is not None:
        return Counter(message.body for message in messages) == Counter(bodies)
    return len(messages) == count if count is not None else bool(messages)


def _is_more(
    messages: Sequence[ReceivedMessage], bodies: Sequence[bytes] | None, count: int | None
) -> bool:
    if bodies is not None:
        return bool(Counter(message.body for message in messages) - Counter(bodies))
    return count is not None and len(messages) > count


# --- transactions --------------------------------------------------------------------------------


def _open_transactions(cluster: Cluster, topic: str) -> list[TransactionEntry]:
    request = ListTransactions(topic=topic or None)
    entries = [listing.entry for listing in list_transactions(cluster, [request])]
    _require_answers(cluster)
    return entries


def _histories(cluster: Cluster, topic: str) -> list[TransactionHistory]:
    """Return the histories of up to SHOWN_MAX transactions, those that are not decided first."""
    states = (None, TransactionState.COMMITTED.text, TransactionState.ROLLED_BACK.text)
    requests = [ListTransactions(state=state, topic=topic or None) for state in states]
    listings = list_transactions(cluster, requests)
    histories = [
        view.history
        for listing, _ in zip(listings, range(SHOWN_MAX), strict=False)
        for view in transaction_histories(
            cluster,
            listing.entry.transaction_id,
            group=listing.entry.group,
            half_offset=listing.entry.queue_offset,
        )
    ]
    _require_answers(cluster)
    return histories


def _find(cluster: Cluster, name: str) -> list[TransactionHistory]:
    """Return the transactions with this message id, or those whose half has this key."""
    views = transaction_histories(cluster, name)
    if not views:
        query = QueryMessage(
            topic=HALF_TOPIC,
            key=name,
            max_num=_KEY_RESULTS_MAX,
            begin_timestamp=0,
            end_timestamp=MAX_TIMESTAMP_MS,
        )
        halves = [to_received_message(view.record) for view in find_by_key(cluster, query)]
        message_ids = dict.fromkeys(half.message_id for half in halves if name in half.keys.split())
        views = [view for id in message_ids for view in transaction_histories(cluster, id)]
    _require_answers(cluster)
    return [view.history for view in views]


# --- the text of a failure -----------------------------------------------------------------------


def _not_delivered_text(
    cluster: Cluster,
    topic: str,
    bodies: Sequence[bytes] | None,
    count: int | None,
    messages: Sequence[ReceivedMessage],
) -> str:
    number = count if bodies is None else len(bodies)
    expected = "messages" if number is None else f"{number} message{'s' * (number != 1)}"
    if bodies:
        expected += f" {sorted(bodies)}"
    shown = [f"  {_message_line(message)}" for message in messages[:SHOWN_MAX]]
    if len(messages) > SHOWN_MAX:
        shown.append(f"  and {len(messages) - SHOWN_MAX} more")
    lines = [f"expected in topic {topic!r}: {expected}; delivered: {len(messages)}", *shown]
    return "\n".join(lines) + "\n" + _text(cluster, topic)


def _message_line(message: ReceivedMessage) -> str:
    names = "".join(
        f" {label}={text}"
        for label, text in (("keys", message.keys), ("tags", message.tags))
        if text
    )
    return f"{message.body[:100]!r}{names} id={message.message_id}"


def _text(cluster: Cluster, topic: str) -> str:
    lines = [line for history in _histories(cluster, topic) for line in _history_lines(history)]
    return "\n".join(lines) or f"no transaction of topic {topic!r} was begun"


def _not_rolled_back_text(names: Sequence[str], histories: Sequence[TransactionHistory]) -> str:
    lines = [line for history in histories for line in _history_lines(history)]
    if not lines:
        return f"no transaction has the message id or key {', '.join(names)}"
    return "\n".join(["expected to be rolled back:", *lines])


def _history_lines(history: TransactionHistory) -> Iterator[str]:
    entry = history.transaction
    yield (
        f"transaction {entry.transaction_id} of group {entry.group!r} for topic {entry.topic!r}: "
        f"{entry.state}, {entry.checks} checks"
    )
    for step in history.steps:
        time = format_timestamp(step.at) if step.at else "unknown time"
        parts = [time, step.what, *filter(None, (step.who, step.detail, step.reason))]
        yield f"  {', '.join(parts)}"
    if history.pending_because:
        yield f"  {history.pending_because}"
