"""The client for threads and frameworks: the same names, the same arguments, without `await`.

    from escrowmq.blocking import Producer

    with Producer("127.0.0.1:9876", group="orders") as producer:
        with producer.transaction(Message("orders", b"o-1")) as tx:
            ...

One thread of this process runs an event loop for all of them; any number of threads may use one
client. A producer also works in a child of the process that made it: there it makes its own
connections (`blocking.py`). A consumer does not: make one in each child.

A thread with an event loop, for those who block; and what a fork does to it.

A child of fork has neither the thread nor the connections of its parent: it has copies of the
sockets, which it must not touch. So both are made anew there, when they are first wanted. Locks are
made anew too: who held one in the parent is not there to let it go.

Consumers for threads and frameworks; `escrowmq.blocking` is where to import them from.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import os
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from escrowmq.client.consumer import consumer as consumers
from escrowmq.client.consumer import pull_consumers as lite
from escrowmq.client.consumer import pull_consumers as puller
from escrowmq.client.consumer.handlers import MessageHandler
from escrowmq.client.consumer.offset_store import SupportsTimestamp
from escrowmq.client.consumer.queue_client import PullResult
from escrowmq.client.messages import Message, MessageQueue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.producer import producer as producers
from escrowmq.client.producer import transaction as transactions
from escrowmq.client.producer import transaction_producer as listeners
from escrowmq.client.producer.checker import Checker, CheckResultCounts
from escrowmq.client.producer.producer import QueueSelector
from escrowmq.client.producer.transaction_producer import (
    TransactionListener,
    TransactionSendResult,
    to_local_message,
    to_verdict,
)
from escrowmq.errors import LocalProtocolError, Rollback, WrongProcess
from escrowmq.message.filter import FilterLike, Subscriptions
from escrowmq.message.transaction import Verdict

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Something of which each process has its own, made when it is first wanted."""

    _instances: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._value: T | None = None
        self._inherited: list[
            T
        ] = []  # the parent's, kept: letting go of it would close its sockets
        PerProcess._instances.add(self)

    def get(self) -> T:
        made = self._value
        if made is None:
            with self._lock:
                made = self._value
                if made is None:
                    made = self._value = self._create()
        return made

    def existing(self) -> T | None:
        return self._value

    @classmethod
    def reset_after_fork(cls) -> None:
        """In the child."""
        for one in list(cls._instances):
            one._lock = threading.Lock()
            if one._value is not None:
                one._inherited.append(one._value)
                one._value = None


os.register_at_fork(after_in_child=PerProcess.reset_after_fork)


class _LoopThread:
    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="escrowmq-client", daemon=True
        )
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: a blocking call crosses to the loop and back, and its way
    there and back is half as long."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_loop_thread = PerProcess(_LoopThread)


def client_loop() -> asyncio.AbstractEventLoop:
    return _loop_thread.get().loop


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it there and wait for it here. What this thread has in its context, it sees."""
    if _loop_thread.get().is_current:
        coroutine.close()
        raise LocalProtocolError(
            "a blocking client was called on its own event loop, which would wait for itself: "
            "in a coroutine use the client of `escrowmq`"
        )
    call = _Call(loop, coroutine)
    loop.call_soon_threadsafe(call.start)
    return call.wait()


class _Call(Generic[T]):
    """Much less than a concurrent Future: one who waits, one lock."""

    __slots__ = ("_context", "_coroutine", "_done", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        self._task = self._loop.create_task(self._coroutine, context=self._context)
        self._task.add_done_callback(lambda _: self._done.release())

    def wait(self) -> T:
        try:
            self._done.acquire()
        except BaseException:  # interrupted: nobody waits any more
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        assert self._task is not None
        return self._task.result()

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()


class BlockingClient:
    """A client that belongs to the process that made it, run on the shared loop."""

    def __init__(self) -> None:
        self._loop = client_loop()
        self._process_id = os.getpid()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            coroutine.close()
            raise WrongProcess("this client was made before a fork: make one in each child")
        return run_on(self._loop, coroutine)


async def call_on_loop(function: Callable[[], T]) -> T:
    """On the loop's thread: what it makes belongs to the loop."""
    return function()


C = TypeVar("C", bound="consumers.Consumer | lite.LiteConsumer | puller.PullConsumer")


class _BlockingConsumer(BlockingClient, Generic[C]):
    """What all have: an inner one, that lives between `with` and `close`."""

    def __init__(self, create: Callable[[], C]) -> None:
        super().__init__()
        self._inner: C = self._run(call_on_loop(create))

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._inner.__aexit__(exc_type, error, traceback))

    def close(self) -> None:
        self._run(self._inner.close())


class Consumer(_BlockingConsumer[consumers.Consumer]):
    """See `escrowmq.Consumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            lambda: consumers.Consumer(servers, group=group, subscribe=subscribe, **options)
        )

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Ends when another thread closes it."""
        while (message := self._run(self._inner.next_message())) is not None:
            yield message

    def receive(self) -> ReceivedMessage:
        return self._run(self._inner.receive())

    def retry_later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        self._run(self._inner.retry_later(message, delay_level=delay_level))

    def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._run(self._inner.reply(message, body, properties=properties))

    def on(
        self, topic: str, expression: FilterLike = "*"
    ) -> Callable[[MessageHandler], MessageHandler]:
        """The function runs in a thread."""

        def register(handler: MessageHandler) -> MessageHandler:
            return self._run(call_on_loop(lambda: self._inner.on(topic, expression)(handler)))

        return register

    def run(self) -> None:
        """Until SIGTERM or SIGINT, if this is the main thread; until `stop` or `close` anywhere."""
        with _stop_on_signals(self.stop):
            self._run(self._inner.run())

    def stop(self) -> None:
        """From any thread, a handler's too: `run` ends when what is in hand is done."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        return self._run(call_on_loop(lambda: self._inner.assigned_queues))


class LiteConsumer(_BlockingConsumer[lite.LiteConsumer]):
    """See `escrowmq.LiteConsumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            lambda: lite.LiteConsumer(servers, group=group, subscribe=subscribe, **options)
        )

    def queues(self, topic: str) -> list[MessageQueue]:
        return self._run(self._inner.queues(topic))

    def assign(self, queues: Sequence[MessageQueue], expression: FilterLike = "*") -> None:
        self._run(self._inner.assign(queues, expression))

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        return self._run(call_on_loop(lambda: self._inner.assigned_queues))

    def poll(
        self, timeout_s: float = 5.0, *, max_messages: int = lite.POLL_BATCH_SIZE
    ) -> list[ReceivedMessage]:
        return self._run(self._inner.poll(timeout_s, max_messages=max_messages))

    def commit(self) -> None:
        self._run(self._inner.commit())

    def committed(self, queue: MessageQueue) -> int | None:
        return self._run(self._inner.committed(queue))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        self._run(self._inner.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        self._run(self._inner.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        self._run(self._inner.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> None:
        self._run(self._inner.seek_to_time(queue, moment))

    def pause(self, *queues: MessageQueue) -> None:
        self._run(call_on_loop(lambda: self._inner.pause(*queues)))

    def resume(self, *queues: MessageQueue) -> None:
        self._run(call_on_loop(lambda: self._inner.resume(*queues)))


class PullConsumer(_BlockingConsumer[puller.PullConsumer]):
    """See `escrowmq.PullConsumer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **options: Any) -> None:
        super().__init__(lambda: puller.PullConsumer(servers, group=group, **options))

    def queues(self, topic: str) -> list[MessageQueue]:
        return self._run(self._inner.queues(topic))

    def assigned_queues(self, topic: str) -> list[MessageQueue]:
        return self._run(self._inner.assigned_queues(topic))

    def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: FilterLike = "*",
        *,
        max_messages: int = 32,
        wait_s: float = 0.0,
    ) -> PullResult:
        return self._run(
            self._inner.pull(queue, offset, expression, max_messages=max_messages, wait_s=wait_s)
        )

    def committed(self, queue: MessageQueue) -> int | None:
        return self._run(self._inner.committed(queue))

    def commit(self, queue: MessageQueue, offset: int) -> None:
        self._run(self._inner.commit(queue, offset))

    def earliest_offset(self, queue: MessageQueue) -> int:
        return self._run(self._inner.earliest_offset(queue))

    def latest_offset(self, queue: MessageQueue) -> int:
        return self._run(self._inner.latest_offset(queue))

    def offset_at_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> int:
        return self._run(self._inner.offset_at_time(queue, moment))


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = [
    "Consumer",
    "LiteConsumer",
    "Producer",
    "PullConsumer",
    "Transaction",
    "TransactionProducer",
]

P = TypeVar("P", bound=producers.Producer)


class _BlockingProducer(Generic[P]):
    """One inner producer per process; checkers are told to each."""

    def __init__(self, create: Callable[[], P]) -> None:
        self._checkers: list[tuple[Checker, dict[str, str]]] = []
        self._create = create
        self._per_process: PerProcess[P] = PerProcess(self._create_inner)
        self._inner()  # what is wrong with its arguments is said now

    def __enter__(self) -> Self:
        self._inner()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        inner = self._per_process.existing()
        if inner is not None:
            self._run(inner.close())

    def send(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> SendResult:
        return self._run(self._inner().send(message, queue=queue))

    def send_oneway(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> None:
        self._run(self._inner().send_oneway(message, queue=queue))

    def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | QueueSelector | None = None
    ) -> list[SendResult]:
        return self._run(self._inner().send_batch(messages, queue=queue))

    def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        return self._run(self._inner().request(message, timeout_s))

    def queues(self, topic: str) -> list[MessageQueue]:
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
            self._run(_register_checker(self._inner(), checker, place))
            self._checkers.append((checker, place))
            return checker

        return register

    @property
    def check_counts(self) -> CheckResultCounts:
        return self._inner().check_counts

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_on(client_loop(), coroutine)

    def _inner(self) -> P:
        return self._per_process.get()

    def _create_inner(self) -> P:
        async def make() -> P:
            inner = self._create()
            for checker, place in self._checkers:
                await _register_checker(inner, checker, place)
            return await inner.__aenter__()

        return self._run(make())


async def _register_checker(
    inner: producers.Producer, checker: Checker, selection: dict[str, str]
) -> None:
    inner.checker(selection["topic"], tag=selection["tag"], name=selection["name"])(checker)


class Producer(_BlockingProducer[producers.Producer]):
    """See `escrowmq.Producer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **options: Any) -> None:
        super().__init__(lambda: producers.Producer(servers, group=group, **options))


class TransactionProducer(_BlockingProducer[listeners.TransactionProducer]):
    """See `escrowmq.TransactionProducer`. The local transaction runs in the calling thread."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        **options: Any,
    ) -> None:
        self.listener = listener
        super().__init__(
            lambda: listeners.TransactionProducer(
                servers, group=group, listener=listener, **options
            )
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
            verdict = to_verdict(execute(to_local_message(message, parked.half), arg))
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
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._run(self._inner.__aexit__(exc_type, error, traceback))

    def send(self, message: Message) -> SendResult:
        return self._run(self._inner.send(message))

    def end(self, verdict: Verdict) -> transactions.TransactionOutcome:
        return self._run(self._inner.end(verdict))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_on(client_loop(), coroutine)

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
    def outcome(self) -> transactions.TransactionOutcome | None:
        return self._inner.outcome
