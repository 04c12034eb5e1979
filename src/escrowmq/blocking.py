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
from escrowmq.client.consumer.handlers import Handler
from escrowmq.client.consumer.offset_store import Moment
from escrowmq.client.consumer.queue_client import Pulled
from escrowmq.client.filters import Subscribed, Wanted
from escrowmq.client.messages import Message, Queue, ReceivedMessage, SendResult, SendStatus
from escrowmq.client.producer import producer as producers
from escrowmq.client.producer import transaction as transactions
from escrowmq.client.producer import transaction_producer as listeners
from escrowmq.client.producer.checker import CheckCounts, Checker
from escrowmq.client.producer.producer import Selector
from escrowmq.client.producer.transaction_producer import (
    TransactionListener,
    TransactionSendResult,
    local_message,
    verdict_of,
)
from escrowmq.errors import LocalProtocolError, Rollback, WrongProcess
from escrowmq.message.transaction import Verdict

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Something of which each process has its own, made when it is first wanted."""

    _all: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: T | None = None
        self._left: list[T] = []  # the parent's, kept: letting go of it would close its sockets
        PerProcess._all.add(self)

    def get(self) -> T:
        made = self._made
        if made is None:
            with self._lock:
                made = self._made
                if made is None:
                    made = self._made = self._make()
        return made

    def existing(self) -> T | None:
        return self._made

    @classmethod
    def forked(cls) -> None:
        """In the child."""
        for one in list(cls._all):
            one._lock = threading.Lock()
            if one._made is not None:
                one._left.append(one._made)
                one._made = None


os.register_at_fork(after_in_child=PerProcess.forked)


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


_thread = PerProcess(_LoopThread)


def client_loop() -> asyncio.AbstractEventLoop:
    return _thread.get().loop


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run it there and wait for it here. What this thread has in its context, it sees."""
    if _thread.get().is_current:
        work.close()
        raise LocalProtocolError(
            "a blocking client was called on its own event loop, which would wait for itself: "
            "in a coroutine use the client of `escrowmq`"
        )
    call = _Call(loop, work)
    loop.call_soon_threadsafe(call.begin)
    return call.wait()


class _Call(Generic[T]):
    """Much less than a concurrent Future: one who waits, one lock."""

    __slots__ = ("_context", "_done", "_loop", "_task", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._work = work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def begin(self) -> None:
        self._task = self._loop.create_task(self._work, context=self._context)
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


class Blocking:
    """A client that belongs to the process that made it, run on the shared loop."""

    def __init__(self) -> None:
        self._loop = client_loop()
        self._process_id = os.getpid()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            work.close()
            raise WrongProcess("this client was made before a fork: make one in each child")
        return run_on(self._loop, work)


async def made(make: Callable[[], T]) -> T:
    """On the loop's thread: what it makes belongs to the loop."""
    return make()


C = TypeVar("C", bound="consumers.Consumer | lite.LiteConsumer | puller.PullConsumer")


class _Consumer(Blocking, Generic[C]):
    """What all have: an inner one, that lives between `with` and `close`."""

    def __init__(self, make: Callable[[], C]) -> None:
        super().__init__()
        self._inner: C = self._run(made(make))

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._inner.__aexit__(kind, error, trace))

    def close(self) -> None:
        self._run(self._inner.close())


class Consumer(_Consumer[consumers.Consumer]):
    """See `escrowmq.Consumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscribed | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            lambda: consumers.Consumer(servers, group=group, subscribe=subscribe, **more)
        )

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Ends when another thread closes it."""
        while (message := self._run(self._inner.next_message())) is not None:
            yield message

    def receive(self) -> ReceivedMessage:
        return self._run(self._inner.receive())

    def later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        self._run(self._inner.later(message, delay_level=delay_level))

    def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._run(self._inner.reply(message, body, properties=properties))

    def on(self, topic: str, wanted: Wanted = "*") -> Callable[[Handler], Handler]:
        """The function runs in a thread."""

        def register(handler: Handler) -> Handler:
            return self._run(made(lambda: self._inner.on(topic, wanted)(handler)))

        return register

    def run(self) -> None:
        """Until SIGTERM or SIGINT, if this is the main thread; until `stop` or `close` anywhere."""
        with _on_signals(self.stop):
            self._run(self._inner.run())

    def stop(self) -> None:
        """From any thread, a handler's too: `run` ends when what is in hand is done."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    @property
    def queues(self) -> list[Queue]:
        return self._run(made(lambda: self._inner.queues))


class LiteConsumer(_Consumer[lite.LiteConsumer]):
    """See `escrowmq.LiteConsumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscribed | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            lambda: lite.LiteConsumer(servers, group=group, subscribe=subscribe, **more)
        )

    def queues(self, topic: str) -> list[Queue]:
        return self._run(self._inner.queues(topic))

    def assign(self, queues: Sequence[Queue], wanted: Wanted = "*") -> None:
        self._run(self._inner.assign(queues, wanted))

    @property
    def assigned(self) -> list[Queue]:
        return self._run(made(lambda: self._inner.assigned))

    def poll(self, timeout_s: float = 5.0, *, most: int = lite.POLLED) -> list[ReceivedMessage]:
        return self._run(self._inner.poll(timeout_s, most=most))

    def commit(self) -> None:
        self._run(self._inner.commit())

    def committed(self, queue: Queue) -> int | None:
        return self._run(self._inner.committed(queue))

    def seek(self, queue: Queue, offset: int) -> None:
        self._run(self._inner.seek(queue, offset))

    def seek_to_begin(self, queue: Queue) -> None:
        self._run(self._inner.seek_to_begin(queue))

    def seek_to_end(self, queue: Queue) -> None:
        self._run(self._inner.seek_to_end(queue))

    def seek_to_time(self, queue: Queue, moment: Moment) -> None:
        self._run(self._inner.seek_to_time(queue, moment))

    def pause(self, *queues: Queue) -> None:
        self._run(made(lambda: self._inner.pause(*queues)))

    def resume(self, *queues: Queue) -> None:
        self._run(made(lambda: self._inner.resume(*queues)))


class PullConsumer(_Consumer[puller.PullConsumer]):
    """See `escrowmq.PullConsumer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **more: Any) -> None:
        super().__init__(lambda: puller.PullConsumer(servers, group=group, **more))

    def queues(self, topic: str) -> list[Queue]:
        return self._run(self._inner.queues(topic))

    def assigned(self, topic: str) -> list[Queue]:
        return self._run(self._inner.assigned(topic))

    def pull(
        self,
        queue: Queue,
        offset: int,
        wanted: Wanted = "*",
        *,
        most: int = 32,
        wait_s: float = 0.0,
    ) -> Pulled:
        return self._run(self._inner.pull(queue, offset, wanted, most=most, wait_s=wait_s))

    def committed(self, queue: Queue) -> int | None:
        return self._run(self._inner.committed(queue))

    def commit(self, queue: Queue, offset: int) -> None:
        self._run(self._inner.commit(queue, offset))

    def earliest(self, queue: Queue) -> int:
        return self._run(self._inner.earliest(queue))

    def latest(self, queue: Queue) -> int:
        return self._run(self._inner.latest(queue))

    def at(self, queue: Queue, moment: Moment) -> int:
        return self._run(self._inner.at(queue, moment))


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
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


class _Producer(Generic[P]):
    """One inner producer per process; checkers are told to each."""

    def __init__(self, make: Callable[[], P]) -> None:
        self._checkers: list[tuple[Checker, dict[str, str]]] = []
        self._make = make
        self._own: PerProcess[P] = PerProcess(self._made)
        self._inner()  # what is wrong with its arguments is said now

    def __enter__(self) -> Self:
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
