"""The client for threads: the classes of `escrowmq` with the same arguments, without `await`.

    from escrowmq.blocking import Producer

    with Producer("127.0.0.1:9876", group="orders") as producer:
        with producer.transaction(Message("orders", b"o-1")) as tx:
            ...

The asyncio client is the implementation. One thread of the process runs an event loop for all
blocking clients; a call starts a coroutine there and waits for it. Any number of threads may use
one client.

After a fork, a producer connects again in the child and can be used there. A consumer cannot:
create one in each child. While a consumer is open in the main thread, SIGTERM ends the program when
it asks for the next message; see `escrowmq.client.termination`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, overload

from escrowmq.client.access import Access
from escrowmq.client.consumer import consumer as consumers
from escrowmq.client.consumer import pull_consumers
from escrowmq.client.consumer.fetcher import ConsumerLimits
from escrowmq.client.consumer.handlers import HandlerT
from escrowmq.client.consumer.offset_store import ConsumeFrom, SupportsTimestamp
from escrowmq.client.consumer.queue_client import PullResult
from escrowmq.client.consumer.rebalance import AssignmentStrategy, average
from escrowmq.client.heartbeat import HEARTBEAT_S
from escrowmq.client.loop_thread import PerProcess, client_loop, is_client_thread, run_on
from escrowmq.client.messages import (
    Message,
    MessageQueue,
    Namespace,
    ReceivedMessage,
    SendResult,
    SendStatus,
)
from escrowmq.client.mistakes import (
    BlockingClient,
    without_frames,
)
from escrowmq.client.producer import producer as producers
from escrowmq.client.producer import transaction as transactions
from escrowmq.client.producer import transaction_producer as transaction_producers
from escrowmq.client.producer.checker import (
    CHECK_REQUEST_HOLD_MAX,
    DEFAULT_CONCURRENCY,
    Checker,
    CheckerT,
    CheckResultCounts,
    to_verdict,
)
from escrowmq.client.producer.producer import ProducerOptions, QueueSelector
from escrowmq.client.producer.sender import (
    BATCH_BYTES_MAX,
    DEFAULT_BODY_BYTES_MAX,
    DEFAULT_COMPRESS_ABOVE_BYTES,
)
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.client.producer.transaction_producer import (
    TransactionListener,
    TransactionSendResult,
    to_local_message,
)
from escrowmq.client.termination import termination
from escrowmq.clock import Clock
from escrowmq.errors import Rollback, WrongProcess
from escrowmq.message.filter import FilterLike, Subscriptions
from escrowmq.message.transaction import Verdict
from escrowmq.parsing import suggest_arguments

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
C = TypeVar(
    "C", bound=consumers.Consumer | pull_consumers.LiteConsumer | pull_consumers.PullConsumer
)

# --- producers -----------------------------------------------------------------------------------


class _Caller(BlockingClient):
    """Runs the coroutines of an asyncio client on the thread of the event loop."""

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if not is_client_thread():  # there it is an error
            try:
                self._warn_on_event_loop()
            except RuntimeWarning:  # warnings may be errors
                coroutine.close()
                raise
        return run_on(client_loop(), coroutine)

    def _run_validated(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._run(coroutine)
        except (TypeError, ValueError) as error:  # of an invalid argument
            raise without_frames(error) from error.__cause__


class _BlockingProducer(_Caller, Generic[P]):
    """What both producers share: one asyncio producer for each process, with all checkers."""

    def __init__(
        self, create: Callable[[Executor | None], P], check_executor: Executor | None
    ) -> None:
        self._checkers: list[tuple[Checker, dict[str, str]]] = []
        self._create = create
        self._check_executor = check_executor
        self._process_id = os.getpid()
        self._per_process: PerProcess[P] = PerProcess(self._create_inner)
        self._inner()  # create it now, so that invalid arguments raise here

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
        """Wait up to 3 s for running checkers, and disconnect."""
        inner = self._per_process.existing()
        if inner is not None:
            self._run(inner.close())

    @property
    def group(self) -> str:
        """The producer group."""
        return self._inner().group

    @property
    def namespace(self) -> Namespace:
        """The prefix of topics and groups; empty without a namespace."""
        return self._inner().namespace

    def send(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> SendResult:
        """Send a message and wait until it is stored; see `escrowmq.Producer.send`.

        Raises RequestRefused or TransportError; their attributes `retriable` and
        `may_have_happened` say whether to try again, and whether the message may be stored.
        """
        return self._run(self._inner().send(message, queue=queue))

    def send_oneway(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> None:
        """Send a message without waiting for a response: it may be lost unnoticed."""
        self._run(self._inner().send_oneway(message, queue=queue))

    def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | QueueSelector | None = None
    ) -> list[SendResult]:
        """Send messages of one topic in few requests; see `escrowmq.Producer.send_batch`.

        Return a result for each message. Raises PartialSend if only the first ones are stored.
        """
        return self._run(self._inner().send_batch(messages, queue=queue))

    def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Send a message and wait for the reply of a consumer.

        Raises OutcomeUnknown if no reply came within `timeout_s`.
        """
        return self._run(self._inner().request(message, timeout_s))

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return the writable queues of a topic. Raises NoRoute if there are none."""
        return self._run(self._inner().queues(topic))

    def transaction(
        self,
        message: Message | None = None,
        *,
        id: str = "",
        name: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> Transaction:
        """Return a transaction, to be used with `with`; see `escrowmq.Producer.transaction`."""
        inner = self._inner()
        transaction = Transaction(inner.transaction(message, id=id, name=name, on_error=on_error))
        transaction._has_warned = self._has_warned
        return transaction

    def checker(
        self, topic: str = "", *, tag: str = "", name: str = ""
    ) -> Callable[[CheckerT], CheckerT]:
        """Register a function that decides open transactions; see `escrowmq.Producer.checker`.

        A plain function runs in a thread.
        """

        def register(checker: CheckerT) -> CheckerT:
            selection = {"topic": topic, "tag": tag, "name": name}
            self._run(_register_checker(self._inner(), checker, selection))
            self._checkers.append((checker, selection))  # for children of this process
            return checker

        return register

    @property
    def check_counts(self) -> CheckResultCounts:
        """How many checks arrived in this process, and how they were answered."""
        return self._inner().check_counts

    def _inner(self) -> P:
        return self._per_process.get()

    def _create_inner(self) -> P:
        # A child of fork has no threads of its parent: the executor would accept checks and never
        # run them. So the producer of a child has an executor of its own.
        executor = self._check_executor if os.getpid() == self._process_id else None

        async def create_on_loop() -> P:
            inner = self._create(executor)
            for checker, selection in self._checkers:
                await _register_checker(inner, checker, selection)
            return await inner.__aenter__()

        return self._run_validated(create_on_loop())


async def _register_checker(
    inner: producers.Producer, checker: Checker, selection: dict[str, str]
) -> None:
    inner.checker(selection["topic"], tag=selection["tag"], name=selection["name"])(checker)


@suggest_arguments
class Producer(_BlockingProducer[producers.Producer]):
    """Sends messages; see `escrowmq.Producer` for the parameters.

    with Producer("127.0.0.1:9876", group="orders") as producer:
        producer.send(Message("orders", b"o-17"))
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        namespace: str = "",
        timeout_s: float = 3.0,
        retries: int = 2,
        compress_above_bytes: int | None = DEFAULT_COMPRESS_ABOVE_BYTES,
        compression: str = "zlib",
        body_bytes_max: int = DEFAULT_BODY_BYTES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        check_concurrency: int = DEFAULT_CONCURRENCY,
        check_request_hold_max: int = CHECK_REQUEST_HOLD_MAX,
        check_executor: Executor | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(
            lambda executor: producers.Producer(
                servers,
                group=group,
                namespace=namespace,
                timeout_s=timeout_s,
                retries=retries,
                compress_above_bytes=compress_above_bytes,
                compression=compression,
                body_bytes_max=body_bytes_max,
                batch_bytes_max=batch_bytes_max,
                check_concurrency=check_concurrency,
                check_request_hold_max=check_request_hold_max,
                check_executor=executor,
                heartbeat_s=heartbeat_s,
                telemetry=telemetry,
                clock=clock,
                access=access,
            ),
            check_executor,
        )


class TransactionProducer(_BlockingProducer[transaction_producers.TransactionProducer]):
    """A producer with a listener; see `escrowmq.TransactionProducer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        listener: TransactionListener,
        clock: Clock | None = None,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self.listener = listener

        def create(executor: Executor | None) -> transaction_producers.TransactionProducer:
            own_options: ProducerOptions = {**options, "check_executor": executor}
            return transaction_producers.TransactionProducer(
                servers, group=group, listener=listener, clock=clock, **own_options
            )

        super().__init__(create, options.get("check_executor"))

    def send_in_transaction(self, message: Message, arg: Any = None) -> TransactionSendResult:
        """Park the message, run the local transaction with `arg`, and end the transaction.

        A plain `execute_local_transaction` runs in the calling thread, so that it can use what
        belongs to this thread, such as a database session. See
        `escrowmq.TransactionProducer.send_in_transaction`.
        """
        inner = self._inner()
        execute = self.listener.execute_local_transaction
        if inspect.iscoroutinefunction(execute):
            return self._run(inner.send_in_transaction(message, arg))
        parked = self._run(inner._park_half(message))
        if parked.half.status is not SendStatus.SEND_OK:
            return self._run(inner._finish(parked, Verdict.ROLLBACK))
        verdict: Verdict = Verdict.UNKNOWN
        failure: Exception | None = None
        try:
            verdict = to_verdict(execute(to_local_message(message, parked.half), arg))
        except Rollback:
            verdict = Verdict.ROLLBACK
        except Exception as error:
            failure = error
        except BaseException as error:
            # SystemExit or KeyboardInterrupt in the thread of the caller, who gets it. The broker
            # is told that nothing is decided, so that it asks soon.
            self._run(inner._finish(parked, Verdict.UNKNOWN, error))
            raise
        return self._run(inner._finish(parked, verdict, failure))


class Transaction(_Caller):
    """A block that commits its messages when it is left normally; see `escrowmq.Transaction`.

    It can be used only in the process that began it.
    """

    def __init__(self, inner: transactions.Transaction) -> None:
        self.asyncio_transaction = inner  # for the coroutines that `run` and `start` get

    def __enter__(self) -> Transaction:
        self._run(self.asyncio_transaction.__aenter__())
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._run(self.asyncio_transaction.__aexit__(exc_type, error, traceback))

    def send(self, message: Message) -> SendResult:
        """Park another message, which is committed or rolled back with the others."""
        return self._run(self.asyncio_transaction.send(message))

    def end(self, verdict: Verdict, *, remark: str = "") -> TransactionOutcome:
        """Commit or roll back now; the end of the block then does nothing."""
        return self._run(self.asyncio_transaction.end(verdict, remark=remark))

    @property
    def id(self) -> str:
        """The id of the transaction, which a checker receives as `message.transaction_id`."""
        return self.asyncio_transaction.id

    @property
    def name(self) -> str:
        """The kind of transaction, by which a checker is chosen; may be empty."""
        return self.asyncio_transaction.name

    @property
    def halves(self) -> list[SendResult]:
        """The messages that are parked so far."""
        return self.asyncio_transaction.halves

    @property
    def outcome(self) -> TransactionOutcome | None:
        """How the transaction ended; None until the end."""
        return self.asyncio_transaction.outcome


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of the blocking clients, and wait for it."""
    return run_on(client_loop(), coroutine)


def start(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the event loop of the blocking clients, without waiting for it."""
    return asyncio.run_coroutine_threadsafe(coroutine, client_loop())


# --- consumers -----------------------------------------------------------------------------------


class _BlockingConsumer(_Caller, Generic[C]):
    """What all consumers share: an asyncio consumer of the process that created it."""

    def __init__(self, create: Callable[[], C]) -> None:
        self._loop = client_loop()
        self._process_id = os.getpid()
        self._inner: C = self._run_validated(_call(create))

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        termination.watch(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._run(self._inner.__aexit__(exc_type, error, traceback))
        finally:
            termination.unwatch(self)

    def close(self) -> None:
        """Leave the group and disconnect."""
        try:
            self._run(self._inner.close())
        finally:
            termination.unwatch(self)

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._inner.group

    @property
    def has_messages_in_hand(self) -> bool:
        """Whether messages were received and are not acknowledged yet. Handlers do not count."""
        return self._inner.has_messages_in_hand

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            coroutine.close()
            raise WrongProcess("this consumer was created before a fork; create one in each child")
        return super()._run(coroutine)

    def _end_if_terminated(self, acknowledge: Callable[[], None]) -> None:
        """End the program if SIGTERM has arrived while it processed the messages before."""
        if termination.is_requested:
            self._run_function(acknowledge)
            termination.check(self)

    def _run_function(self, function: Callable[[], T]) -> T:
        """Call a function on the event loop, to which the inner consumer belongs."""
        return self._run(_call(function))


async def _call(function: Callable[[], T]) -> T:
    return function()


@suggest_arguments
class Consumer(_BlockingConsumer[consumers.Consumer]):
    """A member of a consumer group; see `escrowmq.Consumer` for the parameters.

    with Consumer("127.0.0.1:9876", group="billing", subscribe={"orders": "*"}) as consumer:
        for message in consumer: ...           # asking for the next one acknowledges this one
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        start: ConsumeFrom = "earliest",
        assignment: AssignmentStrategy = average,
        orderly: bool = False,
        broadcast: bool = False,
        offsets_file: str | Path | None = None,
        concurrency: int = 20,
        shutdown_timeout_s: float = 30.0,
        max_reconsume_times: int | None = None,
        suspend_s: float = 1.0,
        limits: ConsumerLimits | None = None,
        namespace: str = "",
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(
            lambda: consumers.Consumer(
                servers,
                group=group,
                subscribe=subscribe,
                start=start,
                assignment=assignment,
                orderly=orderly,
                broadcast=broadcast,
                offsets_file=offsets_file,
                concurrency=concurrency,
                shutdown_timeout_s=shutdown_timeout_s,
                max_reconsume_times=max_reconsume_times,
                suspend_s=suspend_s,
                limits=limits,
                namespace=namespace,
                telemetry=telemetry,
                clock=clock,
                access=access,
            )
        )

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Iterate over messages until another thread closes the consumer."""
        while (message := self.next_message()) is not None:
            yield message

    @overload
    def receive(self) -> ReceivedMessage: ...

    @overload
    def receive(self, *, timeout_s: float | None) -> ReceivedMessage | None: ...

    def receive(self, *, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Wait for the next message. Acknowledges the one before, also if no message comes.

        Return None if none came within `timeout_s`; 0 does not wait, and None waits without end.
        Raises ClientClosed if the consumer is closed.
        """
        self._end_if_terminated(self._inner._acknowledge)
        return self._run(self._inner.receive(timeout_s=timeout_s))

    def receive_batch(
        self,
        max_messages: int = consumers.RECEIVE_BATCH_SIZE,
        *,
        timeout_s: float | None = None,
        auto_acknowledge: bool = True,
    ) -> list[ReceivedMessage]:
        """Wait for a message, and return it with others; see `escrowmq.Consumer.receive_batch`.

        Acknowledges all messages of the call before. Return an empty list if none came within
        `timeout_s`.
        """
        self._end_if_terminated(self._inner._acknowledge)
        return self._run(
            self._inner.receive_batch(
                max_messages, timeout_s=timeout_s, auto_acknowledge=auto_acknowledge
            )
        )

    def acknowledge(self, message: ReceivedMessage) -> None:
        """Acknowledge a message. Has no effect if it is not in flight any more."""
        self._run_function(lambda: self._inner.acknowledge(message))

    def is_in_flight(self, message: ReceivedMessage) -> bool:
        """Return whether a message is still this member's; see `escrowmq.Consumer.is_in_flight`."""
        return self._run_function(lambda: self._inner.is_in_flight(message))

    def next_message(self) -> ReceivedMessage | None:
        """Wait for the next message, as `receive` does; return None if the consumer is closed."""
        self._end_if_terminated(self._inner._acknowledge)
        return self._run(self._inner.next_message())

    def retry_later(
        self,
        message: ReceivedMessage,
        *,
        delay_level: int = 0,
        delay_s: float | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        """Have the message delivered again later; see `escrowmq.Consumer.retry_later`."""
        self._run(
            self._inner.retry_later(message, delay_level=delay_level, delay_s=delay_s, cause=cause)
        )

    def dead_letter(
        self, message: ReceivedMessage, *, cause: BaseException | str, attempts: int = 0
    ) -> None:
        """Move a message to the dead letters of the group; see `escrowmq.Consumer.dead_letter`."""
        self._run(self._inner.dead_letter(message, cause=cause, attempts=attempts))

    def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Send a reply to the producer that sent the message with `producer.request`."""
        self._run(self._inner.reply(message, body, properties=properties))

    def on(self, topic: str, expression: FilterLike = "*") -> Callable[[HandlerT], HandlerT]:
        """Register a handler for a topic; see `escrowmq.Consumer.on`.

        A plain function runs in a thread.
        """

        def register(handler: HandlerT) -> HandlerT:
            return self._run_validated(_call(lambda: self._inner.on(topic, expression)(handler)))

        return register

    def run(self) -> None:
        """Run the handlers until `stop` or `close` is called; see `escrowmq.Consumer.run`.

        In the main thread, SIGTERM and SIGINT stop it too.
        """
        with _stop_on_signals(self.stop):
            self._run(self._inner.run())

    def stop(self) -> None:
        """Make `run` finish the running handlers and return. Any thread may call it."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """The queues that this member has now."""
        return self._run_function(lambda: self._inner.assigned_queues)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows signal handlers in the main thread only
        return
    previous = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@suggest_arguments
class LiteConsumer(_BlockingConsumer[pull_consumers.LiteConsumer]):
    """A consumer that is polled for batches; see `escrowmq.LiteConsumer` for the parameters.

    with LiteConsumer("127.0.0.1:9876", group="report", subscribe={"orders": "*"}) as consumer:
        while messages := consumer.poll(timeout_s=5):
            ...                            # the next poll acknowledges these
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscriptions | None = None,
        start: ConsumeFrom = "earliest",
        assignment: AssignmentStrategy = average,
        auto_commit: bool = True,
        limits: ConsumerLimits | None = None,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(
            lambda: pull_consumers.LiteConsumer(
                servers,
                group=group,
                subscribe=subscribe,
                start=start,
                assignment=assignment,
                auto_commit=auto_commit,
                limits=limits,
                namespace=namespace,
                clock=clock,
                access=access,
            )
        )

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return all queues of a topic, whichever member has them. Raises NoRoute."""
        return self._run(self._inner.queues(topic))

    def assign(self, queues: Sequence[MessageQueue], expression: FilterLike = "*") -> None:
        """Read exactly these queues, whatever other members read."""
        self._run(self._inner.assign(queues, expression))

    @property
    def assigned_queues(self) -> list[MessageQueue]:
        """The queues that this consumer reads now."""
        return self._run_function(lambda: self._inner.assigned_queues)

    def poll(
        self, timeout_s: float = 5.0, *, max_messages: int = pull_consumers.POLL_BATCH_SIZE
    ) -> list[ReceivedMessage]:
        """Return up to `max_messages` messages; an empty list if none came within `timeout_s`.

        Acknowledges the messages of the poll before.
        """
        self._end_if_terminated(self._inner._acknowledge)
        return self._run(self._inner.poll(timeout_s, max_messages=max_messages))

    def commit(self) -> None:
        """Acknowledge and commit all messages polled. Raises TransportError or RequestRefused."""
        self._run(self._inner.commit())

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the queue offset that the group committed; None if it never did."""
        return self._run(self._inner.committed(queue))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at a queue offset. Messages of the queue polled before are not acknowledged."""
        self._run(self._inner.seek(queue, offset))

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue at the oldest message of a queue."""
        self._run(self._inner.seek_to_begin(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Skip all messages that are in a queue now."""
        self._run(self._inner.seek_to_end(queue))

    def seek_to_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> None:
        """Continue at the first message that was stored at that time or later."""
        self._run(self._inner.seek_to_time(queue, moment))

    def pause(self, *queues: MessageQueue) -> None:
        """Make `poll` return no messages of these queues until `resume`."""
        self._run_function(lambda: self._inner.pause(*queues))

    def resume(self, *queues: MessageQueue) -> None:
        """Undo `pause`."""
        self._run_function(lambda: self._inner.resume(*queues))


@suggest_arguments
class PullConsumer(_BlockingConsumer[pull_consumers.PullConsumer]):
    """A consumer that reads queues by hand; see `escrowmq.PullConsumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        assignment: AssignmentStrategy = average,
        namespace: str = "",
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        super().__init__(
            lambda: pull_consumers.PullConsumer(
                servers,
                group=group,
                assignment=assignment,
                namespace=namespace,
                clock=clock,
                access=access,
            )
        )

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return all queues of a topic. Raises NoRoute."""
        return self._run(self._inner.queues(topic))

    def assigned_queues(self, topic: str) -> list[MessageQueue]:
        """Join the group, and return this member's share of the queues of a topic."""
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
        """Pull messages from a queue offset on; see `escrowmq.PullConsumer.pull`."""
        return self._run(
            self._inner.pull(queue, offset, expression, max_messages=max_messages, wait_s=wait_s)
        )

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the queue offset that the group committed; None if it never did."""
        return self._run(self._inner.committed(queue))

    def commit(self, queue: MessageQueue, offset: int) -> None:
        """Commit the queue offset of the next message to read. Creates the group if needed."""
        self._run(self._inner.commit(queue, offset))

    def earliest_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the oldest message."""
        return self._run(self._inner.earliest_offset(queue))

    def latest_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the next message that will be stored."""
        return self._run(self._inner.latest_offset(queue))

    def offset_at_time(self, queue: MessageQueue, moment: SupportsTimestamp) -> int:
        """Return the queue offset of the first message stored at that time or later."""
        return self._run(self._inner.offset_at_time(queue, moment))
