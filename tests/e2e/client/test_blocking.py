"""The blocking client, used by several threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from escrowmq import Message, ReceivedMessage, Rollback, Verdict
from escrowmq.blocking import Consumer, Producer
from escrowmq.errors import LocalProtocolError
from tests.support.brokers import LocalServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
    with LocalServer(conf) as server:
        yield server


def receive(server: LocalServer, topic: str, count: int) -> list[bytes]:
    with Consumer(server.namesrv_address, group=f"g-{topic}", subscribe={topic: "*"}) as consumer:
        return [message.body for _, message in zip(range(count), consumer, strict=False)]


def test_many_threads_send_through_one_producer(server: LocalServer) -> None:
    bodies = [b"%d" % number for number in range(40)]
    with Producer(server.namesrv_address, group="p") as producer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda body: producer.send(Message("threads", body)), bodies))
    assert sorted(receive(server, "threads", 40)) == sorted(bodies)


@pytest.fixture
def python_sigint_handler() -> Iterator[None]:
    """Handle SIGINT as Python does: a Spark session in this process has a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_sigint_handler")
def test_an_interrupted_call_is_cancelled_and_the_client_keeps_working(server: LocalServer) -> None:
    with Producer(server.namesrv_address, group="p", timeout_s=60) as producer:
        producer.send(Message("interrupted", b"before"))
        # A timer, because the calling thread blocks; the frozen broker does not respond before.
        interrupt = threading.Timer(
            0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)
        )
        with server.frozen(), pytest.raises(KeyboardInterrupt):  # noqa: PT012
            interrupt.start()
            producer.send(Message("interrupted", b"maybe"))
        producer.send(Message("interrupted", b"after"))


def test_a_blocking_call_in_the_thread_of_the_event_loop_is_refused(server: LocalServer) -> None:
    refused: list[LocalProtocolError] = []
    with Producer(server.namesrv_address, group="own-thread") as producer:

        @producer.checker("own-thread")
        async def check(message: ReceivedMessage) -> Verdict:
            try:
                producer.send(Message("own-thread", b"from the loop"))
            except LocalProtocolError as error:
                refused.append(error)
            return Verdict.COMMIT

        # The transaction stays open, so the broker checks it, and the checker runs on the loop.
        with pytest.raises(ZeroDivisionError), producer.transaction(Message("own-thread", b"x")):
            raise ZeroDivisionError
        assert receive(server, "own-thread", 1) == [b"x"]
    assert "wait for itself" in str(refused[0])


def test_a_block_commits_rolls_back_or_is_checked(server: LocalServer) -> None:
    with Producer(server.namesrv_address, group="p") as producer:

        @producer.checker("paid")
        def check(message: ReceivedMessage) -> Verdict:
            return Verdict.COMMIT if message.body == b"crashed" else Verdict.ROLLBACK

        with producer.transaction(Message("paid", b"first")) as tx:
            tx.send(Message("paid", b"second"))
        assert tx.outcome is not None
        assert (tx.outcome.state, tx.outcome.acknowledged) == ("committed", True)
        with producer.transaction(Message("paid", b"no")) as tx:
            raise Rollback
        with pytest.raises(ZeroDivisionError), producer.transaction(Message("paid", b"crashed")):
            raise ZeroDivisionError
        assert sorted(receive(server, "paid", 3)) == [b"crashed", b"first", b"second"]
