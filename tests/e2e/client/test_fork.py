"""Clients after a fork: a blocking producer works in the child, an asyncio one is refused."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from escrowmq import Consumer as AsyncConsumer
from escrowmq import LiteConsumer as AsyncLiteConsumer
from escrowmq import Message, ReceivedMessage, Verdict
from escrowmq import Producer as AsyncProducer
from escrowmq import PullConsumer as AsyncPullConsumer
from escrowmq.blocking import Consumer, LiteConsumer, Producer, PullConsumer
from escrowmq.errors import WrongProcess
from tests.support.brokers import LocalServer

pytestmark = [
    pytest.mark.slow,
    # Python warns about a fork while other threads run, which is tested here.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

CHILDREN = 3


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
    # In a process of its own: a child of fork must not have a part of the broker.
    with LocalServer(conf, in_process=False) as server:
        yield server


def run_in_child(function: Callable[[], object]) -> int:
    """Run a function in a child and return its exit code: 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def receive(server: LocalServer, topic: str, count: int) -> list[bytes]:
    """Return the sorted bodies of the first messages of a topic."""
    with Consumer(server.namesrv_address, group=f"g-{topic}", subscribe={topic: "*"}) as consumer:
        return sorted(message.body for _, message in zip(range(count), consumer, strict=False))


def test_a_child_can_send_with_its_parents_producer(server: LocalServer) -> None:
    with Producer(server.namesrv_address, group="p") as producer:
        producer.send(Message("forked", b"parent before"))
        for number in range(CHILDREN):
            assert run_in_child(partial(producer.send, Message("forked", b"%d" % number))) == 0
            producer.send(Message("forked", b"parent after %d" % number))
    expected = [b"parent before"]
    expected += [b"%d" % n for n in range(CHILDREN)]
    expected += [b"parent after %d" % n for n in range(CHILDREN)]
    assert receive(server, "forked", len(expected)) == sorted(expected)


def test_children_of_multiprocessing_each_have_their_own_connection(server: LocalServer) -> None:
    with Producer(server.namesrv_address, group="p") as producer:
        producer.send(Message("pooled", b"parent"))
        context = multiprocessing.get_context("fork")
        children = [
            context.Process(target=lambda n=n: producer.send(Message("pooled", b"%d" % n)))
            for n in range(CHILDREN)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0] * CHILDREN
    assert receive(server, "pooled", CHILDREN + 1) == [b"0", b"1", b"2", b"parent"]


def test_a_fork_while_other_threads_send_leaves_no_lock_behind(server: LocalServer) -> None:
    stopped = threading.Event()
    with Producer(server.namesrv_address, group="p") as producer:

        def send_until_stopped() -> None:
            while not stopped.is_set():
                producer.send(Message("busy", b"x"))

        threads = [threading.Thread(target=send_until_stopped) for _ in range(4)]
        for thread in threads:
            thread.start()
        codes = [run_in_child(lambda: producer.send(Message("busy-child", b"c"))) for _ in range(6)]
        stopped.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 6
    assert receive(server, "busy-child", 6) == [b"c"] * 6


def test_a_child_answers_checks_of_its_own_open_transactions(server: LocalServer) -> None:
    """The child's own client registers the checkers of the parent."""
    with Producer(server.namesrv_address, group="forked-checks") as producer:

        @producer.checker("left-open")
        def commit(message: ReceivedMessage) -> Verdict:
            return Verdict.COMMIT

        producer.send(Message("left-open", b"first"))

        def leave_open() -> None:
            tx = producer.transaction(Message("left-open", b"from the child"))
            tx.__enter__()
            with Consumer(
                server.namesrv_address, group="child", subscribe={"left-open": "*"}
            ) as consumer:
                while consumer.receive().body != b"from the child":
                    pass

        assert run_in_child(leave_open) == 0


def test_a_child_answers_checks_although_the_threads_of_the_executor_are_gone(
    server: LocalServer,
) -> None:
    def commit(message: ReceivedMessage) -> Verdict:
        return Verdict.COMMIT

    topic = "executor-of-the-parent"
    with (
        ThreadPoolExecutor(1) as executor,
        Producer(server.namesrv_address, group=topic, check_executor=executor) as producer,
    ):
        producer.checker(topic)(commit)
        executor.submit(os.getpid).result()  # its only thread runs now, in this process

        def leave_open() -> None:
            producer.transaction(Message(topic, b"from the child")).__enter__()
            assert receive(server, topic, 1) == [b"from the child"]
            assert producer.check_counts.committed == 1

        assert run_in_child(leave_open) == 0


def test_a_transaction_of_the_parent_is_not_ended_by_a_child(server: LocalServer) -> None:
    with (
        Producer(server.namesrv_address, group="p") as producer,
        producer.transaction(Message("parents", b"x")) as tx,
    ):

        def use_in_child() -> None:
            with pytest.raises(WrongProcess, match="fork"):
                tx.send(Message("parents", b"y"))

        assert run_in_child(use_in_child) == 0
    assert tx.outcome is not None
    assert tx.outcome.acknowledged
    assert receive(server, "parents", 1) == [b"x"]


async def test_an_asyncio_client_of_another_process_is_refused(server: LocalServer) -> None:
    async with AsyncProducer(server.namesrv_address, group="p") as producer:
        await producer.send(Message("awaited", b"parent"))

        def use_in_child() -> None:
            with pytest.raises(WrongProcess, match="create a client in each child"):
                asyncio.run(producer.send(Message("awaited", b"child")))

        assert run_in_child(use_in_child) == 0
        await producer.send(Message("awaited", b"parent again"))


async def test_an_asyncio_consumer_of_another_process_is_refused(server: LocalServer) -> None:
    address = server.namesrv_address
    async with (
        AsyncConsumer(address, group="f", subscribe="orders") as consumer,
        AsyncLiteConsumer(address, group="f-lite", subscribe="orders") as lite,
        AsyncPullConsumer(address, group="f") as puller,
    ):

        def use_in_child() -> None:
            for call in (consumer.receive, lite.poll, lambda: puller.queues("orders")):
                with pytest.raises(WrongProcess, match="create a client in each child"):
                    asyncio.run(call())

        assert run_in_child(use_in_child) == 0


def test_a_blocking_consumer_of_another_process_is_refused(server: LocalServer) -> None:
    address = server.namesrv_address
    with (
        Consumer(address, group="f", subscribe="orders") as consumer,
        LiteConsumer(address, group="f-lite", subscribe="orders") as lite,
        PullConsumer(address, group="f") as puller,
    ):

        def use_in_child() -> None:
            for call in (consumer.receive, lite.poll, lambda: puller.queues("orders")):
                with pytest.raises(WrongProcess, match="create one in each child"):
                    call()

        assert run_in_child(use_in_child) == 0
