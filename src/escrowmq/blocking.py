"""The client for threads and frameworks: the same names, the same arguments, without `await`.

    from escrowmq.blocking import Producer

    with Producer("127.0.0.1:9876", group="orders") as producer:
        with producer.transaction(Message("orders", b"o-1")) as tx:
            ...

One thread of this process runs an event loop for all of them; any number of threads may use one
client. After a fork the child has no such thread: a client made in the parent says so, and a new
one works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from escrowmq.blocking_consumers import Consumer, LiteConsumer, PullConsumer
from escrowmq.client import producer as producers
from escrowmq.client import transaction as transactions
from escrowmq.client.checkers import Checker
from escrowmq.client.messages import Message, Queue, SendResult
from escrowmq.loopthread import Blocking, made
from escrowmq.message.verdict import Verdict

__all__ = ["Consumer", "LiteConsumer", "Producer", "PullConsumer", "Transaction"]


class Producer(Blocking):
    """See `escrowmq.Producer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **more: Any) -> None:
        super().__init__()
        self._inner = self._run(made(lambda: producers.Producer(servers, group=group, **more)))

    def __enter__(self) -> Producer:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._inner.close())

    def send(self, message: Message, *, queue: Queue | None = None) -> SendResult:
        return self._run(self._inner.send(message, queue=queue))

    def send_one_way(self, message: Message) -> None:
        self._run(self._inner.send_one_way(message))

    def transaction(
        self,
        message: Message | None = None,
        *,
        id: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> Transaction:
        return Transaction(self, self._inner.transaction(message, id=id, on_error=on_error))

    def checker(self, topic: str, *, tag: str = "") -> Callable[[Checker], Checker]:
        """The function runs in a thread."""
        return self._inner.checker(topic, tag=tag)


class Transaction:
    """See `escrowmq.Transaction`."""

    def __init__(self, producer: Producer, inner: transactions.Transaction) -> None:
        self._producer = producer
        self._inner = inner

    def __enter__(self) -> Transaction:
        self._producer._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._producer._run(self._inner.__aexit__(kind, error, trace))

    def send(self, message: Message) -> SendResult:
        return self._producer._run(self._inner.send(message))

    def end(self, verdict: Verdict) -> transactions.Outcome:
        return self._producer._run(self._inner.end(verdict))

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def halves(self) -> list[SendResult]:
        return self._inner.halves

    @property
    def outcome(self) -> transactions.Outcome | None:
        return self._inner.outcome
