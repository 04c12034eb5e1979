"""The client for threads and frameworks: the same names, the same arguments, without `await`.

    from escrowmq.blocking import Producer

    with Producer("127.0.0.1:9876", group="orders") as producer:
        with producer.transaction(Message("orders", b"o-1")) as tx:
            ...

One thread of this process runs an event loop for all of them; any number of threads may use one
client. A producer also works in a child of the process that made it: there it makes its own
connections (`client/loopthread.py`). A consumer does not: make one in each child.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from escrowmq.blocking_consumers import Consumer, LiteConsumer, PullConsumer
from escrowmq.client import listener as listeners
from escrowmq.client import producer as producers
from escrowmq.client import transaction as transactions
from escrowmq.client.checkers import CheckCounts, Checker
from escrowmq.client.listener import (
    TransactionListener,
    TransactionSendResult,
    local_message,
    verdict_of,
)
from escrowmq.client.loopthread import PerProcess, client_loop, run_on
from escrowmq.client.messages import Message, Queue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.producer import Selector
from escrowmq.errors import Rollback
from escrowmq.message.verdict import Verdict

__all__ = [
    "Consumer",
    "LiteConsumer",
    "Producer",
    "PullConsumer",
    "Transaction",
    "TransactionProducer",
]

T = TypeVar("T")
P = TypeVar("P", bound=producers.Producer)
Self = TypeVar("Self", bound="_Producer[Any]")


class _Producer(Generic[P]):
    """One inner producer per process; checkers are told to each."""

    def __init__(self, make: Callable[[], P]) -> None:
        self._checkers: list[tuple[Checker, dict[str, str]]] = []
        self._make = make
        self._own: PerProcess[P] = PerProcess(self._made)
        self._inner()  # what is wrong with its arguments is said now

    def __enter__(self: Self) -> Self:
        self._inner()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        inner = self._own.existing()
        if inner is not None:
            self._run(inner.close())

    def send(self, message: Message, *, queue: Queue | Selector | None = None) -> SendResult:
        return self._run(self._inner().send(message, queue=queue))

    def send_one_way(self, message: Message, *, queue: Queue | Selector | None = None) -> None:
        self._run(self._inner().send_one_way(message, queue=queue))

    def send_batch(
        self, messages: Sequence[Message], *, queue: Queue | Selector | None = None
    ) -> list[SendResult]:
        return self._run(self._inner().send_batch(messages, queue=queue))

    def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        return self._run(self._inner().request(message, timeout_s))

    def queues(self, topic: str) -> list[Queue]:
        return self._run(self._inner().queues(topic))

    def transaction(
        self,
        message: Message | None = None,
        *,
        id: str = "",
        name: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> Transaction:
        inner = self._inner()
        return Transaction(inner.transaction(message, id=id, name=name, on_error=on_error))

    def checker(
        self, topic: str = "", *, tag: str = "", name: str = ""
    ) -> Callable[[Checker], Checker]:
        """The function runs in a thread."""

        def register(checker: Checker) -> Checker:
            place = {"topic": topic, "tag": tag, "name": name}
            self._run(_register(self._inner(), checker, place))
            self._checkers.append((checker, place))
            return checker

        return register

    @property
    def check_counts(self) -> CheckCounts:
        return self._inner().check_counts

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_on(client_loop(), work)

    def _inner(self) -> P:
        return self._own.get()

    def _made(self) -> P:
        async def make() -> P:
            inner = self._make()
            for checker, place in self._checkers:
                await _register(inner, checker, place)
            return await inner.__aenter__()

        return self._run(make())


async def _register(inner: producers.Producer, checker: Checker, place: dict[str, str]) -> None:
    inner.checker(place["topic"], tag=place["tag"], name=place["name"])(checker)


class Producer(_Producer[producers.Producer]):
    """See `escrowmq.Producer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **more: Any) -> None:
        super().__init__(lambda: producers.Producer(servers, group=group, **more))


class TransactionProducer(_Producer[listeners.TransactionProducer]):
    """See `escrowmq.TransactionProducer`. The local transaction runs in the calling thread."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        **more: Any,
    ) -> None:
        self.listener = listener
        super().__init__(
            lambda: listeners.TransactionProducer(servers, group=group, listener=listener, **more)
        )

    def send_in_transaction(self, message: Message, arg: Any = None) -> TransactionSendResult:
        inner = self._inner()
        execute = self.listener.execute_local_transaction
        if inspect.iscoroutinefunction(execute):
            return self._run(inner.send_in_transaction(message, arg))
        parked = self._run(inner.park(message))
        if parked.half.status is not SendStatus.SEND_OK:
            return self._run(inner.finish(parked, Verdict.ROLLBACK))
        verdict: Verdict = Verdict.UNKNOWN
        error: Exception | None = None
        try:
            verdict = verdict_of(execute(local_message(message, parked.half), arg))
        except Rollback:
            verdict = Verdict.ROLLBACK
        except Exception as failure:
            error = failure
        return self._run(inner.finish(parked, verdict, error))


class Transaction:
    """See `escrowmq.Transaction`. It belongs to the process that began it."""

    def __init__(self, inner: transactions.Transaction) -> None:
        self._inner = inner

    def __enter__(self) -> Transaction:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._run(self._inner.__aexit__(kind, error, trace))

    def send(self, message: Message) -> SendResult:
        return self._run(self._inner.send(message))

    def end(self, verdict: Verdict) -> transactions.Outcome:
        return self._run(self._inner.end(verdict))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return run_on(client_loop(), work)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def halves(self) -> list[SendResult]:
        return self._inner.halves

    @property
    def outcome(self) -> transactions.Outcome | None:
        return self._inner.outcome
