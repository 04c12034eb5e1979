"""Transaction checks: which checker is called, in which process, and what happens if it fails or
too many checks arrive."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from escrowmq import (
    Message,
    Producer,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
    blocking,
)
from escrowmq.client.producer.checker import CheckerRegistry
from tests.support.brokers import Server

pytestmark = pytest.mark.slow

CONF = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
WAIT_S = 30.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("checkers"), conf=CONF) as served:
        yield served


def bodies(served: Server, topic: str) -> list[bytes]:
    with served.client() as reader:
        found = [record.body for queue in range(4) for record in reader.pull_all(topic, queue)]
    return sorted(found)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def leave_open(producer: Producer, message: Message, **options: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with producer.transaction(message, **options):
            raise ZeroDivisionError


@asynccontextmanager
async def a_producer(served: Server, group: str, **more: Any) -> AsyncIterator[Producer]:
    async with Producer(served.namesrv_address, group=group, **more) as producer:
        yield producer


async def test_the_most_specific_checker_is_called(served: Server) -> None:
    asked: dict[str, str] = {}

    def saying(who: str) -> Callable[[ReceivedMessage], Verdict]:
        def check(message: ReceivedMessage) -> Verdict:
            asked[message.body.decode()] = who
            return Verdict.COMMIT

        return check

    async with a_producer(served, "closest") as producer:
        producer.checker("*")(saying("all"))
        producer.checker("near")(saying("topic"))
        producer.checker("near", tag="red")(saying("tag"))
        producer.checker(name="transfer")(saying("name"))
        await leave_open(producer, Message("far", b"1"))
        await leave_open(producer, Message("near", b"2"))
        await leave_open(producer, Message("near", b"3", tags="red"))
        await leave_open(producer, Message("near", b"4", tags="red"), name="transfer")
        await leave_open(producer, Message("near", b"5"), name="other")
        await until(lambda: len(asked) == 5)
    assert asked == {"1": "all", "2": "topic", "3": "tag", "4": "name", "5": "topic"}


@pytest.mark.parametrize("wrong", [{}, {"topic": "t", "name": "n"}, {"topic": "*", "tag": "x"}])
async def test_a_checker_for_nothing_is_refused(wrong: dict[str, str]) -> None:
    async with Producer("127.0.0.1:1", group="g") as producer:
        with pytest.raises(ValueError, match="topic"):
            producer.checker(**wrong)(lambda message: None)


async def test_a_process_that_never_sends_gets_checks_of_another_process(served: Server) -> None:
    async with a_producer(served, "left") as producer:
        await leave_open(producer, Message("left", b"by one that is gone"))
    async with a_producer(served, "left") as successor:

        @successor.checker("*")
        def commit(message: ReceivedMessage) -> Verdict:
            return Verdict.COMMIT

        await until(lambda: bodies(served, "left") == [b"by one that is gone"])


async def test_an_exception_of_a_checker_is_unknown_logged_and_counted(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    said: Iterator[Any] = iter([OSError("no database"), "COMMIT", None, Verdict.COMMIT])

    async with a_producer(served, "failing") as producer:

        @producer.checker("failing")
        async def check(message: ReceivedMessage) -> Any:
            now = next(said)
            if isinstance(now, Exception):
                raise now
            return now

        await leave_open(producer, Message("failing", b"x"))
        await until(lambda: bodies(served, "failing") == [b"x"])
        counts = producer.check_counts
    assert (counts.received, counts.failed, counts.unknown, counts.committed) == (4, 2, 3, 1)
    assert "no database" in caplog.text


async def test_a_check_without_a_checker_is_logged_and_counted(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_producer(served, "nobody") as producer:
        await leave_open(producer, Message("nobody", b"x"))
        await until(lambda: producer.check_counts.unregistered > 0)
    assert "no checker for" in caplog.text


async def test_no_more_checkers_run_than_check_concurrency_allows(served: Server) -> None:
    running, most = 0, 0
    lock = threading.Lock()
    two_are_in = threading.Barrier(2)

    async with a_producer(served, "pooled", check_concurrency=2) as producer:

        @producer.checker("pooled")
        def check(message: ReceivedMessage) -> Verdict:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            two_are_in.wait(WAIT_S)  # both run at the same time
            with lock:
                running -= 1
            return Verdict.COMMIT

        for number in range(6):
            await leave_open(producer, Message("pooled", b"%d" % number))
        await until(lambda: len(bodies(served, "pooled")) == 6)
    assert most == 2


async def test_checks_beyond_the_limit_are_answered_with_unknown(
    served: Server, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()
    async with a_producer(served, "full") as producer:
        # Private: a full registry needs 10,000 checks otherwise.
        producer._checkers = CheckerRegistry("full", pending_max=1)

        @producer.checker("full")
        async def check(message: ReceivedMessage) -> Verdict:
            await go_on.wait()
            return Verdict.COMMIT

        for number in range(3):
            await leave_open(producer, Message("full", b"%d" % number))
        with caplog.at_level(logging.ERROR):
            await until(lambda: producer.check_counts.overflowed > 0)
        assert "answering UNKNOWN to another one" in caplog.text
        go_on.set()
        await until(lambda: len(bodies(served, "full")) == 3)


# --- listeners -----------------------------------------------------------------------------------


class Ledger(TransactionListener):
    """Records what it executed and answers checks from that, by the message's key."""

    def __init__(self) -> None:
        self.done: dict[str, Verdict] = {}
        self.thread: threading.Thread | None = None
        self.checked: list[ReceivedMessage] = []

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict | None:
        self.thread = threading.current_thread()
        self.done[message.transaction_id] = Verdict.COMMIT
        if arg == "crash":
            raise RuntimeError("after the work was done")
        return Verdict.ROLLBACK if arg == "no" else Verdict.COMMIT

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        self.checked.append(message)
        return self.done[message.transaction_id]


async def test_a_listener_executes_and_checks_local_transactions(served: Server) -> None:
    ledger = Ledger()
    async with TransactionProducer(
        served.namesrv_address, group="listener", listener=ledger
    ) as producer:
        first = await producer.send_in_transaction(Message("listened", b"first"))
        assert (first.local_state, first.outcome.acknowledged) == (Verdict.COMMIT, True)
        assert bodies(served, "listened") == [b"first"]
        refused = await producer.send_in_transaction(Message("listened", b"refused"), "no")
        assert (refused.local_state, refused.outcome.state) == (Verdict.ROLLBACK, "rolled_back")
        crashed = await producer.send_in_transaction(Message("listened", b"crashed"), "crash")
        assert (crashed.local_state, crashed.outcome.state) == (Verdict.UNKNOWN, "open")
        assert isinstance(crashed.error, RuntimeError)
        await until(lambda: bodies(served, "listened") == [b"crashed", b"first"])
    assert {message.transaction_id for message in ledger.checked} == {crashed.transaction_id}


def test_a_blocking_listener_runs_the_local_transaction_in_the_calling_thread(
    served: Server,
) -> None:
    ledger = Ledger()
    with blocking.TransactionProducer(
        served.namesrv_address, group="listener-blocking", listener=ledger
    ) as producer:
        result = producer.send_in_transaction(Message("listened-blocking", b"x"))
        assert ledger.thread is threading.current_thread()
        assert (result.local_state, result.outcome.acknowledged) == (Verdict.COMMIT, True)
        crashed = producer.send_in_transaction(Message("listened-blocking", b"y"), "crash")
        assert isinstance(crashed.error, RuntimeError)
        asyncio.run(until(lambda: bodies(served, "listened-blocking") == [b"x", b"y"]))
