"""Transaction checks: which checker is called, in which process, and what happens if it fails or
too many checks arrive."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from escrowmq import (
    LocalTransactionState,
    Message,
    Producer,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
    blocking,
)
from tests.support.brokers import LocalServer
from tests.support.clients import WAIT_S
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

CONF = {"transactionTimeOut": 500, "transactionCheckInterval": 500}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONF) as server:
        yield server


def bodies(server: LocalServer, topic: str) -> list[bytes]:
    with server.client() as reader:
        records = [record for queue in range(4) for record in reader.pull_all(topic, queue)]
    return sorted(record.body for record in records)


async def leave_open(producer: Producer, message: Message, **options: Any) -> None:
    """Send a half message and leave its transaction open, so that the broker checks it."""
    with pytest.raises(ZeroDivisionError):
        async with producer.transaction(message, **options):
            raise ZeroDivisionError


@asynccontextmanager
async def producer_in(server: LocalServer, group: str, **options: Any) -> AsyncIterator[Producer]:
    async with Producer(server.namesrv_address, group=group, **options) as producer:
        yield producer


async def test_the_most_specific_checker_is_called(server: LocalServer) -> None:
    called: dict[str, str] = {}  # from a message to the checker that was called

    def checker(name: str) -> Callable[[ReceivedMessage], Verdict]:
        def check(message: ReceivedMessage) -> Verdict:
            called[message.body.decode()] = name
            return Verdict.COMMIT

        return check

    async with producer_in(server, "closest") as producer:
        producer.checker("*")(checker("all"))
        producer.checker("near")(checker("topic"))
        producer.checker("near", tag="red")(checker("tag"))
        producer.checker(name="transfer")(checker("name"))
        await leave_open(producer, Message("far", b"1"))
        await leave_open(producer, Message("near", b"2"))
        await leave_open(producer, Message("near", b"3", tags="red"))
        await leave_open(producer, Message("near", b"4", tags="red"), name="transfer")
        await leave_open(producer, Message("near", b"5"), name="other")
        await wait_until_async(lambda: len(called) == 5)
    assert called == {"1": "all", "2": "topic", "3": "tag", "4": "name", "5": "topic"}


@pytest.mark.parametrize("arguments", [{}, {"topic": "t", "name": "n"}, {"topic": "*", "tag": "x"}])
async def test_a_checker_with_contradictory_arguments_is_refused(
    arguments: dict[str, str],
) -> None:
    async with Producer("127.0.0.1:1", group="g") as producer:
        with pytest.raises(ValueError, match="topic"):
            producer.checker(**arguments)(lambda message: None)


async def test_a_process_that_never_sends_gets_checks_of_another_process(
    server: LocalServer,
) -> None:
    async with producer_in(server, "left") as producer:
        await leave_open(producer, Message("left", b"open"))
    async with producer_in(server, "left") as successor:

        @successor.checker("*")
        def commit(message: ReceivedMessage) -> Verdict:
            return Verdict.COMMIT

        await wait_until_async(lambda: bodies(server, "left") == [b"open"])


async def test_an_exception_or_wrong_result_of_a_checker_counts_as_unknown(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    results: Iterator[Any] = iter([OSError("no database"), "COMMIT", None, Verdict.COMMIT])

    async with producer_in(server, "failing") as producer:

        @producer.checker("failing")
        async def check(message: ReceivedMessage) -> Any:
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

        await leave_open(producer, Message("failing", b"x"))
        await wait_until_async(lambda: bodies(server, "failing") == [b"x"])
        counts = producer.check_counts
    assert (counts.received, counts.failed, counts.unknown, counts.committed) == (4, 2, 3, 1)
    assert "no database" in caplog.text


async def test_a_check_without_a_checker_is_logged_and_counted(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with producer_in(server, "unchecked") as producer:
        await leave_open(producer, Message("unchecked", b"x"))
        await wait_until_async(lambda: producer.check_counts.unregistered > 0)
    assert "no checker for" in caplog.text


async def test_no_more_checkers_run_than_check_concurrency_allows(server: LocalServer) -> None:
    running, most = 0, 0
    lock = threading.Lock()
    both_started = threading.Barrier(2)

    async with producer_in(server, "pooled", check_concurrency=2) as producer:

        @producer.checker("pooled")
        def check(message: ReceivedMessage) -> Verdict:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            both_started.wait(WAIT_S)  # returns only when two checkers run at the same time
            with lock:
                running -= 1
            return Verdict.COMMIT

        for number in range(6):
            await leave_open(producer, Message("pooled", b"%d" % number))
        await wait_until_async(lambda: len(bodies(server, "pooled")) == 6)
    assert most == 2


async def test_checks_beyond_the_limit_are_answered_with_unknown(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    may_return = asyncio.Event()
    options = {"check_concurrency": 1, "check_request_hold_max": 1}
    async with producer_in(server, "full", **options) as producer:

        @producer.checker("full")
        async def check(message: ReceivedMessage) -> Verdict:
            await may_return.wait()
            return Verdict.COMMIT

        for number in range(3):
            await leave_open(producer, Message("full", b"%d" % number))
        with caplog.at_level(logging.ERROR):
            await wait_until_async(lambda: producer.check_counts.overflowed > 0)
        assert "1 checks are waiting, answering UNKNOWN to another one" in caplog.text
        may_return.set()
        await wait_until_async(lambda: len(bodies(server, "full")) == 3)


async def test_a_check_answered_with_rollback_or_unknown_is_a_warning(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {b"yes": [Verdict.COMMIT], b"no": [Verdict.UNKNOWN, Verdict.ROLLBACK]}
    async with producer_in(server, "warned") as producer:

        @producer.checker("warned")
        async def check(message: ReceivedMessage) -> Verdict:
            return answers[message.body].pop(0)

        for body in answers:
            await leave_open(producer, Message("warned", body, keys="k"))
        await wait_until_async(lambda: not any(answers.values()))
    warnings = [
        record.getMessage().split(" id=")[0]
        for record in caplog.records
        if record.levelno == logging.WARNING and "topic=warned" in record.getMessage()
    ]
    assert warnings == ["check answered with UNKNOWN", "check answered with ROLLBACK"]


# --- executors -----------------------------------------------------------------------------------


async def test_checkers_run_in_the_executor_of_the_user_which_stays_open(
    server: LocalServer,
) -> None:
    threads: set[str] = set()

    def check(message: ReceivedMessage) -> Verdict:
        threads.add(threading.current_thread().name.split("_")[0])
        return Verdict.COMMIT

    with ThreadPoolExecutor(2, "my-checks") as executor:
        async with producer_in(server, "own-executor", check_executor=executor) as producer:
            producer.checker("own-executor")(check)
            for number in range(3):
                await leave_open(producer, Message("own-executor", b"%d" % number))
            await wait_until_async(lambda: len(bodies(server, "own-executor")) == 3)
        assert executor.submit(threading.current_thread).result().name.startswith("my-checks")
    assert threads == {"my-checks"}


async def test_an_executor_that_takes_no_work_makes_the_check_fail_with_an_answer(
    server: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    async with producer_in(server, "shut-down", check_executor=executor) as producer:
        producer.checker("shut-down")(lambda message: Verdict.COMMIT)
        await leave_open(producer, Message("shut-down", b"x"))
        await wait_until_async(lambda: producer.check_counts.failed > 0)
        assert producer.check_counts.unknown == producer.check_counts.failed
    assert "after shutdown" in caplog.text


# --- listeners -----------------------------------------------------------------------------------


class RecordingListener(TransactionListener):
    """Record the verdict of each local transaction, and return it to checks."""

    def __init__(self) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self.thread: threading.Thread | None = None
        self.checked: list[ReceivedMessage] = []

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict | None:
        self.thread = threading.current_thread()
        self.verdicts[message.transaction_id] = Verdict.COMMIT
        if arg == "crash":
            raise RuntimeError("after the work was done")
        return Verdict.ROLLBACK if arg == "no" else Verdict.COMMIT

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        self.checked.append(message)
        return self.verdicts[message.transaction_id]


async def test_a_listener_executes_and_checks_local_transactions(server: LocalServer) -> None:
    listener = RecordingListener()
    async with TransactionProducer(
        server.namesrv_address, group="listener", listener=listener
    ) as producer:
        first = await producer.send_in_transaction(Message("listened", b"first"))
        assert (first.local_state, first.outcome.acknowledged) == (Verdict.COMMIT, True)
        assert bodies(server, "listened") == [b"first"]
        second = await producer.send_in_transaction(Message("listened", b"second"), "no")
        assert (second.local_state, second.outcome.state) == (Verdict.ROLLBACK, "rolled_back")
        crashed = await producer.send_in_transaction(Message("listened", b"crashed"), "crash")
        assert (crashed.local_state, crashed.outcome.state) == (Verdict.UNKNOWN, "open")
        assert isinstance(crashed.error, RuntimeError)
        await wait_until_async(lambda: bodies(server, "listened") == [b"crashed", b"first"])
    assert {message.transaction_id for message in listener.checked} == {crashed.transaction_id}


def test_a_blocking_listener_runs_the_local_transaction_in_the_calling_thread(
    server: LocalServer,
) -> None:
    listener = RecordingListener()
    with blocking.TransactionProducer(
        server.namesrv_address, group="listener-blocking", listener=listener
    ) as producer:
        result = producer.send_in_transaction(Message("listened-blocking", b"x"))
        assert listener.thread is threading.current_thread()
        assert (result.local_state, result.outcome.acknowledged) == (Verdict.COMMIT, True)
        crashed = producer.send_in_transaction(Message("listened-blocking", b"y"), "crash")
        assert isinstance(crashed.error, RuntimeError)
        asyncio.run(wait_until_async(lambda: bodies(server, "listened-blocking") == [b"x", b"y"]))


class CountingExecutor(ThreadPoolExecutor):
    """Counts the calls that it has accepted and not finished."""

    def __init__(self) -> None:
        super().__init__(5)
        self.submitted = self.in_flight = self.in_flight_max = 0

    def submit(self, *call: Any, **options: Any) -> Future[Any]:
        self.submitted += 1
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        future = super().submit(*call, **options)
        future.add_done_callback(self._count_finished)
        return future

    def _count_finished(self, _: Future[Any]) -> None:
        self.in_flight -= 1


class UndecidedListener(RecordingListener):
    """Leaves every transaction open, and commits it at the check."""

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict | None:
        return LocalTransactionState.UNKNOW

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        return LocalTransactionState.COMMIT_MESSAGE


def test_a_listener_is_called_for_one_check_at_a_time_as_by_rocketmqs_client(
    server: LocalServer,
) -> None:
    topic, count = "one-at-a-time", 6
    with (
        CountingExecutor() as executor,
        blocking.TransactionProducer(
            server.namesrv_address,
            group=topic,
            listener=UndecidedListener(),
            check_executor=executor,
            check_concurrency=1,
        ) as producer,
    ):
        for number in range(count):
            producer.send_in_transaction(Message(topic, b"%d" % number))
        asyncio.run(wait_until_async(lambda: len(bodies(server, topic)) == count))
    assert executor.submitted >= count
    assert executor.in_flight_max == 1
