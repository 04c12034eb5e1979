"""Mistakes that every user makes: each gets a sentence at once, and none waits for ever."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import escrowmq
from escrowmq import (
    Consumer,
    LiteConsumer,
    Message,
    Producer,
    PullConsumer,
    TransactionListener,
    TransactionProducer,
    Verdict,
    blocking,
)
from escrowmq.errors import (
    ClientClosed,
    InvalidSubscription,
    LocalProtocolError,
    NoRoute,
    WrongEventLoop,
)
from tests.support.brokers import Server
from tests.support.clients import WAIT_S, receive, send
from tests.support.programs import run_program
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("mistakes")) as server:
        yield server


def raises(error: type[Exception], text: str) -> Any:
    """Expect an error whose text contains this one."""
    return pytest.raises(error, match=re.escape(text))


class Listener(TransactionListener):
    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict:
        return Verdict.COMMIT

    def check_local_transaction(self, message: escrowmq.ReceivedMessage) -> Verdict:
        return Verdict.COMMIT


# --- clients that are not started, or closed ------------------------------------------------------


async def test_an_asyncio_consumer_that_is_not_started_says_so(server: Server) -> None:
    consumer = Consumer(server.namesrv_address, group="g", subscribe="orders")
    lite = LiteConsumer(server.namesrv_address, group="g", subscribe="orders")
    text = "this consumer is not started: use it in a block, `async with Consumer(…) as consumer:`"
    for call in (consumer.receive, consumer.receive_batch, consumer.next_message):
        with raises(ClientClosed, text):
            await call()
    with raises(ClientClosed, text):
        async for _ in consumer:
            pass
    with raises(ClientClosed, "`async with LiteConsumer(…) as consumer:`"):
        await lite.poll()
    unsubscribed = LiteConsumer(server.namesrv_address, group="g")
    with raises(ClientClosed, "`async with LiteConsumer(…) as consumer:`"):
        await unsubscribed.assign([])


def test_a_blocking_consumer_that_is_not_started_says_so(server: Server) -> None:
    consumer = blocking.Consumer(server.namesrv_address, group="g", subscribe="orders")
    lite = blocking.LiteConsumer(server.namesrv_address, group="g", subscribe="orders")
    text = "not started: use it in a block"
    for call in (consumer.receive, consumer.receive_batch, consumer.next_message):
        with raises(ClientClosed, text):
            call()
    with raises(ClientClosed, text):
        next(iter(consumer))
    with raises(ClientClosed, text):
        lite.poll()
    unsubscribed = blocking.LiteConsumer(server.namesrv_address, group="g")
    with raises(ClientClosed, "or a plain `with` if it is from escrowmq.blocking"):
        unsubscribed.assign([])


async def test_asyncio_producers_and_pull_consumers_start_at_the_first_use(server: Server) -> None:
    producer = Producer(server.namesrv_address, group="unstarted")
    puller = PullConsumer(server.namesrv_address, group="unstarted")
    listening = TransactionProducer(server.namesrv_address, group="unstarted", listener=Listener())
    await producer.send(Message("unstarted", b"1"))
    async with producer.transaction(Message("unstarted", b"2")):
        pass
    await listening.send_in_transaction(Message("unstarted", b"3"))
    queues = await puller.queues("unstarted")
    results = [await puller.pull(queue, 0) for queue in queues]
    assert sorted(m.body for result in results for m in result.messages) == [b"1", b"2", b"3"]
    for client in (producer, puller, listening):
        await client.close()


def test_blocking_producers_and_pull_consumers_start_at_the_first_use(server: Server) -> None:
    producer = blocking.Producer(server.namesrv_address, group="b-unstarted")
    puller = blocking.PullConsumer(server.namesrv_address, group="b-unstarted")
    listening = blocking.TransactionProducer(
        server.namesrv_address, group="b-unstarted", listener=Listener()
    )
    producer.send(Message("b-unstarted", b"1"))
    listening.send_in_transaction(Message("b-unstarted", b"2"))
    results = [puller.pull(queue, 0) for queue in puller.queues("b-unstarted")]
    assert sorted(m.body for result in results for m in result.messages) == [b"1", b"2"]
    for client in (producer, puller, listening):
        client.close()


async def test_a_closed_client_says_so(server: Server) -> None:
    producer = Producer(server.namesrv_address, group="g")
    consumer = Consumer(server.namesrv_address, group="closed", subscribe="orders")
    lite = LiteConsumer(server.namesrv_address, group="closed-lite", subscribe="orders")
    puller = PullConsumer(server.namesrv_address, group="g")
    async with producer, consumer, lite, puller:
        pass
    closed = "this client is closed; create a new one"
    with raises(ClientClosed, closed):
        await producer.send(Message("orders", b"x"))
    with raises(ClientClosed, closed):
        await puller.queues("orders")
    for client in (producer, consumer, lite, puller):
        with raises(ClientClosed, closed):
            await client.__aenter__()
    with raises(ClientClosed, "the consumer is closed; create a new one to receive more"):
        await consumer.receive()
    with raises(ClientClosed, "the consumer is closed; create a new one to receive more"):
        await lite.poll()


async def test_a_consumer_that_reads_nothing_says_so(server: Server) -> None:
    async with Consumer(server.namesrv_address, group="g") as consumer:
        with raises(LocalProtocolError, "subscribes to no topic: give subscribe=, or register"):
            await consumer.receive(timeout_s=0)
    async with LiteConsumer(server.namesrv_address, group="g") as lite:
        with raises(LocalProtocolError, "reads nothing: give subscribe=, or choose queues with"):
            await lite.poll()


def test_an_asyncio_client_in_a_second_event_loop_says_so(server: Server) -> None:
    result = run_program(
        """
        import asyncio, sys
        from escrowmq import Message, Producer
        producer = Producer(sys.argv[1], group="g")
        asyncio.run(producer.send(Message("loops", b"x")))
        asyncio.run(producer.send(Message("loops", b"y")))
        """,
        server.namesrv_address,
    )
    assert result.last_error == (
        "escrowmq.errors.WrongEventLoop: this client is connected in another event loop; create a "
        "client in each asyncio.run(), or use escrowmq.blocking"
    )


async def test_an_asyncio_client_in_the_event_loop_of_another_thread_says_so(
    server: Server,
) -> None:
    await send(server, "loops", b"w")
    async with Producer(server.namesrv_address, group="g") as producer:
        await producer.send(Message("loops", b"x"))  # its route and connection are known now
        with raises(WrongEventLoop, "this client is connected in another event loop"):
            await asyncio.to_thread(asyncio.run, producer.send(Message("loops", b"y")))


# --- the wrong kind of client ---------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
async def test_a_blocking_client_on_an_event_loop_warns_once(server: Server) -> None:
    text = "escrowmq.blocking.Producer was called in a running event loop.* use escrowmq.Producer"
    with pytest.warns(RuntimeWarning, match=text) as warnings:
        producer = blocking.Producer(server.namesrv_address, group="g")
    assert warnings[0].filename == __file__
    producer.send(Message("warned", b"x"))
    await asyncio.to_thread(producer.close)


async def test_a_blocking_client_in_a_thread_beside_an_event_loop_is_fine(server: Server) -> None:
    def produce() -> None:
        with blocking.Producer(server.namesrv_address, group="g") as producer:
            producer.send(Message("threads", b"x"))

    await asyncio.to_thread(produce)


def test_an_asyncio_client_in_a_plain_block_names_the_blocking_one(server: Server) -> None:
    client: Any
    for client in (
        Producer(server.namesrv_address, group="g"),
        Consumer(server.namesrv_address, group="g"),
        LiteConsumer(server.namesrv_address, group="g"),
        PullConsumer(server.namesrv_address, group="g"),
        Producer(server.namesrv_address, group="g").transaction(),
    ):
        name = type(client).__name__
        text = f"{name} is for asyncio: use `async with`, or escrowmq.blocking.{name} without"
        with raises(TypeError, text), client:
            pass
    consumer: Any = type("Subclass", (Consumer,), {})(server.namesrv_address, group="g")
    with raises(TypeError, "Consumer is for asyncio: use `async for`, or escrowmq.blocking.Consum"):
        next(iter(consumer))


async def test_a_blocking_client_in_an_async_block_names_the_asyncio_one(server: Server) -> None:
    def create() -> list[Any]:
        return [
            blocking.Producer(server.namesrv_address, group="g"),
            blocking.Consumer(server.namesrv_address, group="g"),
            blocking.LiteConsumer(server.namesrv_address, group="g"),
            blocking.PullConsumer(server.namesrv_address, group="g"),
        ]

    for client in await asyncio.to_thread(create):
        name = type(client).__name__
        text = f"escrowmq.blocking.{name} is for threads: use a plain `with`, or escrowmq.{name}"
        with raises(TypeError, text):
            async with client:
                pass
        if name == "Consumer":
            with raises(TypeError, "use a plain `for`, or escrowmq.Consumer with asyncio"):
                async for _ in client:
                    pass
        await asyncio.to_thread(client.close)


async def test_a_send_in_a_transaction_that_is_not_awaited_is_not_committed(
    server: Server,
) -> None:
    async with Producer(server.namesrv_address, group="unawaited") as producer:
        tx = producer.transaction(Message("unawaited", b"first"))
        with raises(LocalProtocolError, "tx.send() was called without await (calls: 1)"):
            async with tx:
                tx.send(Message("unawaited", b"second"))  # type: ignore[unused-coroutine]
    assert tx.outcome is not None
    assert tx.outcome.verdict is Verdict.UNKNOWN


# --- topics and subscriptions ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, list, tuple, dict])
async def test_a_subscription_is_a_topic_a_list_or_filters(server: Server, kind: type) -> None:
    topic = f"subscribed-{kind.__name__}"
    forms: dict[type, Any] = {str: topic, list: [topic], tuple: (topic,), dict: {topic: "*"}}
    address, subscribe = server.namesrv_address, forms[kind]
    await send(server, topic, b"x")
    async with Consumer(address, group=f"g-{topic}", subscribe=subscribe) as consumer:
        assert await receive(consumer, 1) == [b"x"]
    async with LiteConsumer(address, group=f"l-{topic}", subscribe=subscribe) as lite:
        assert [message.body for message in await lite.poll(WAIT_S)] == [b"x"]


@pytest.mark.parametrize(
    ("subscribe", "text"),
    [
        ("my orders", "topic name 'my orders' may contain only letters, digits and %|_-"),
        ("orders, stock", "topic name 'orders, stock' may contain only"),
        ({"orders": 5}, "a filter is '*', tags like 'a || b', or SqlFilter(…), not 5"),
        ([b"orders"], "a topic is a text, not b'orders'"),
        (5, "subscribe= is a topic, a list of topics, or filters by topic, not 5"),
    ],
)
def test_an_impossible_subscription_is_refused(server: Server, subscribe: Any, text: str) -> None:
    for kind in (Consumer, LiteConsumer, blocking.Consumer, blocking.LiteConsumer):
        with raises(InvalidSubscription, text):
            kind(server.namesrv_address, group="g", subscribe=subscribe)


async def test_a_misspelt_topic_gets_a_warning_and_a_suggestion(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await send(server, "payments", b"x")
    async with Consumer(server.namesrv_address, group="typo", subscribe="paymets") as consumer:
        # It is there when the block begins.
        (warning,) = [r.getMessage() for r in caplog.records if "paymets" in r.getMessage()]
        assert warning == (
            "group=typo waits for a topic: no broker has topic paymets; did you mean payments?"
        )
        rebalances = consumer._rebalancer.rebalance_requested  # private: to make it look again
        for _ in range(3):
            rebalances.set()
            await wait_until_async(lambda: not rebalances.is_set())
        assert len([r for r in caplog.records if "waits for a topic" in r.getMessage()]) == 1
        caplog.set_level(logging.INFO)
        await send(server, "paymets", b"late")
        assert await receive(consumer, 1) == [b"late"]
        assert "topic found group=typo topic=paymets" in caplog.text


async def test_a_misspelt_topic_in_a_call_gets_a_suggestion(server: Server) -> None:
    await send(server, "invoices", b"x")
    async with PullConsumer(server.namesrv_address, group="g") as puller:
        with raises(NoRoute, "no broker has topic invoice; did you mean invoices?"):
            await puller.queues("invoice")
    async with LiteConsumer(server.namesrv_address, group="g") as lite:
        with raises(NoRoute, "no broker has topic invoice; did you mean invoices?"):
            await lite.queues("invoice")


def test_a_topic_that_no_broker_creates_gets_a_suggestion(tmp_path: Path) -> None:
    with (
        Server(tmp_path, conf={"autoCreateTopicEnable": "false"}) as strict,
        blocking.Producer(strict.namesrv_address, group="g") as producer,
    ):
        text = "no broker has topic orders; no broker creates topics by itself: `escrowmq topic"
        with raises(NoRoute, text):
            producer.send(Message("orders", b"x"))


def test_a_name_server_without_brokers_says_so(tmp_path: Path) -> None:
    with (
        Server(tmp_path, role="namesrv") as server,
        blocking.Producer(server.namesrv_address, group="g") as producer,
    ):
        text = "no broker has topic orders: the name server knows no running broker"
        with pytest.raises(NoRoute, match=f"{text}$"):
            producer.send(Message("orders", b"x"))


async def test_members_with_different_subscriptions_are_warned(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await send(server, "apples", b"x")
    await send(server, "pears", b"x")
    first = Consumer(server.namesrv_address, group="mixed", subscribe="apples")
    second = Consumer(server.namesrv_address, group="mixed", subscribe="pears")
    async with first, second:
        text = "the members of group mixed have different subscriptions to apples, pears"
        assert text in caplog.text
        wait_until(lambda: text in server.errors, lambda: server.errors)


async def test_two_tasks_that_receive_from_one_consumer_are_refused(server: Server) -> None:
    address, text = server.namesrv_address, "another task or thread waits for messages of this"
    async with (
        Consumer(address, group="two", subscribe="two") as consumer,
        LiteConsumer(address, group="three", subscribe="three") as lite,
    ):
        receivers: list[tuple[str, Callable[[], Any]]] = [
            ("two", consumer.receive),
            ("three", lambda: lite.poll(WAIT_S)),
        ]
        for topic, receive_one in receivers:
            waiting = asyncio.ensure_future(receive_one())
            await asyncio.sleep(0)  # it waits now
            with raises(LocalProtocolError, text):
                await receive_one()
            await send(server, topic, b"x")
            assert await waiting  # it was not disturbed


async def test_a_member_that_gets_no_queue_is_warned(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with server.client() as client:
        client.create_topic("narrow", queues=1)
    members = [
        Consumer(server.namesrv_address, group="crowd", subscribe="narrow") for _ in range(2)
    ]
    async with members[0], members[1]:
        text = "this member gets no messages group=crowd topic=narrow: the other ones of 2 members"
        await wait_until_async(lambda: text in caplog.text)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("text", "bytes, not str: use text.encode()"),
        ({"id": 1}, "bytes, not dict: use json.dumps(value).encode()"),
        (bytearray(b"x"), "bytes, not bytearray: use bytes(body)"),
        (None, "bytes, not NoneType: encode it first"),
    ],
)
def test_a_body_that_is_not_bytes_is_refused(body: Any, text: str) -> None:
    with raises(TypeError, f"the body of a message must be {text}"):
        Message("orders", body)
    assert Message("orders", json.dumps({"id": 1}).encode()).body == b'{"id": 1}'


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"key": "k"}, "Message has no argument key; did you mean keys?"),
        ({"tag": "t"}, "Message has no argument tag; did you mean tags?"),
        ({"tags": ["a", "b"]}, "are texts, not topic='orders' and tags=['a', 'b']"),
    ],
)
def test_a_misspelt_argument_of_a_message_gets_a_suggestion(
    arguments: dict[str, Any], text: str
) -> None:
    with raises(TypeError, text):
        Message("orders", b"x", **arguments)


def test_a_misspelt_argument_of_a_client_gets_a_suggestion() -> None:
    client: Any
    for client in (Consumer, blocking.Consumer):
        with raises(TypeError, "Consumer has no argument subscription; did you mean subscribe?"):
            client("127.0.0.1:9876", group="g", subscription="orders")
    for client in (Producer, blocking.Producer):
        with raises(TypeError, "Producer has no argument retry; did you mean retries?"):
            client("127.0.0.1:9876", group="g", retry=3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"delay_s": datetime.timedelta(seconds=5)}, "delay_s must be a number of seconds"),
        ({"deliver_at": 1_700_000_000_000}, "deliver_at is a datetime with a time zone, not 17"),
        ({"deliver_at": datetime.datetime(2030, 1, 1)}, "deliver_at needs a time zone"),  # noqa: DTZ001
    ],
)
def test_a_time_in_another_unit_is_refused(arguments: dict[str, Any], text: str) -> None:
    with raises(LocalProtocolError, text):
        Message("orders", b"x", **arguments)


async def test_a_timeout_that_is_no_number_is_refused(server: Server) -> None:
    with raises(TypeError, "timeout_s is a number of seconds, not '3'"):
        Producer(server.namesrv_address, group="g", timeout_s="3")  # type: ignore[arg-type]
    wrong: Any = datetime.timedelta(seconds=3)
    async with Consumer(server.namesrv_address, group="g", subscribe="orders") as consumer:
        with raises(TypeError, "timeout_s is a number of seconds, not datetime.timedelta"):
            await consumer.receive(timeout_s=wrong)


async def test_something_else_than_a_message_is_refused(server: Server) -> None:
    wrong: Any
    await send(server, "forwarded", b"x")
    async with (
        Producer(server.namesrv_address, group="g") as producer,
        Consumer(server.namesrv_address, group="forward", subscribe="forwarded") as consumer,
    ):
        for wrong in ("orders", b"x", {"topic": "orders"}):
            for call in (producer.send, producer.send_oneway):
                with raises(TypeError, "a producer sends Message('orders', b'…'), not "):
                    await call(wrong)
            with raises(TypeError, "a producer sends Message('orders', b'…'), not "):
                await producer.send_batch([wrong])
        wrong = await consumer.receive()
        with raises(TypeError, "a new Message(topic, received.body), not a received one"):
            await producer.send(wrong)


async def test_a_topic_with_spaces_is_refused(server: Server) -> None:
    async with Producer(server.namesrv_address, group="g") as producer:
        with raises(LocalProtocolError, "topic name 'my topic' may contain only letters"):
            await producer.send(Message("my topic", b"x"))


@pytest.mark.parametrize(
    ("group", "error", "text"),
    [
        ("my group", ValueError, "the group 'my group' may contain only letters, digits and %|_-"),
        ("", ValueError, "the group is empty: give group=, a name that all its members share"),
        (5, TypeError, "a group is a text, not 5"),
    ],
)
def test_an_impossible_group_is_refused(group: Any, error: type[Exception], text: str) -> None:
    client: Any
    for client in (
        *(Producer, Consumer, LiteConsumer, PullConsumer),
        *(blocking.Producer, blocking.Consumer, blocking.LiteConsumer, blocking.PullConsumer),
    ):
        with raises(error, text):
            client("127.0.0.1:9876", group=group)


# --- functions of the application -----------------------------------------------------------------


def no_parameter() -> None: ...


def two_parameters(session: Any, message: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (no_parameter, "but no_parameter() does not: too many positional arguments"),
        (
            two_parameters,
            "but two_parameters(session, message) does not: missing a required argument: 'message'",
        ),
        (5, "it has to be a function, not 5"),
    ],
)
def test_a_function_with_other_parameters_is_refused(
    server: Server, function: Any, text: str
) -> None:
    consumer = Consumer(server.namesrv_address, group="g")
    producer = Producer(server.namesrv_address, group="g")
    registrations: list[tuple[Callable[..., Any], str]] = [
        (consumer.on("orders"), "a handler of messages takes message"),
        (producer.checker("orders"), "a checker of transactions takes message"),
    ]
    for register, role in registrations:
        with raises(TypeError, role):
            register(function)
        with raises(TypeError, text):
            register(function)


def test_a_listener_with_other_parameters_is_refused(server: Server) -> None:
    class Wrong(Listener):
        def execute_local_transaction(self, message: Message) -> Verdict:  # type: ignore[override]
            return Verdict.COMMIT

    with raises(TypeError, "execute_local_transaction of a listener takes message and arg, but"):
        TransactionProducer(server.namesrv_address, group="g", listener=Wrong())


def test_a_decorator_without_its_topic_is_refused(server: Server) -> None:
    consumer: Any = Consumer(server.namesrv_address, group="g")
    producer: Any = Producer(server.namesrv_address, group="g")
    with raises(TypeError, "the decorator needs a topic: @consumer.on('orders')"):
        consumer.on(no_parameter)
    with raises(TypeError, "the decorator needs a topic: @producer.checker('orders')"):
        producer.checker(no_parameter)


async def test_a_checker_that_returns_no_verdict_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
    with Server(tmp_path, conf=conf) as server:
        async with Producer(server.namesrv_address, group="verdicts") as producer:
            wrong: Any = producer.checker("verdicts")
            wrong(lambda message: True)
            with pytest.raises(ZeroDivisionError):  # it stays open, so the broker checks it
                async with producer.transaction(Message("verdicts", b"x")):
                    raise ZeroDivisionError
            text = "a checker or listener returns Verdict.COMMIT, Verdict.ROLLBACK or Verdict.UNK"
            await wait_until_async(lambda: text in caplog.text)
        assert "not True" in caplog.text


async def test_a_producer_without_checkers_in_the_group_of_others_is_explained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
    with Server(tmp_path, conf=conf) as server:
        async with Producer(server.namesrv_address, group="shared") as producer:
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(Message("shared", b"x")):
                    raise ZeroDivisionError
            text = "or give this producer another group than those that have checkers"
            await wait_until_async(lambda: text in caplog.text)


# --- what a user sees -----------------------------------------------------------------------------


def test_python_warns_about_a_send_that_is_not_awaited(server: Server) -> None:
    result = run_program(
        """
        import asyncio, sys, warnings
        from escrowmq import Message, Producer

        async def main():
            async with Producer(sys.argv[1], group="g") as producer:
                producer.send(Message("orders", b"x"))

        warnings.simplefilter("always")
        asyncio.run(main())
        """,
        server.namesrv_address,
    )
    assert "RuntimeWarning: coroutine 'Producer.send' was never awaited" in result.err


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            """
            import sys
            from escrowmq.blocking import Consumer
            Consumer(sys.argv[1], group="g", subscribe="orders").receive()
            """,
            "escrowmq.errors.ClientClosed: this consumer is not started: use it in a block",
        ),
        (
            """
            from escrowmq.blocking import Producer
            Producer(9876, group="g")
            """,
            "ValueError: the address of a name server is a text such as '127.0.0.1:9876', or a "
            "list of them, not 9876",
        ),
        (
            """
            from escrowmq.blocking import Producer
            Producer("http://127.0.0.1:9876", group="g")
            """,
            "ValueError: 'http://127.0.0.1:9876' is not an address, expected host:port such as",
        ),
    ],
)
def test_a_traceback_is_short_and_ends_in_a_sentence(
    server: Server, source: str, sentence: str
) -> None:
    result = run_program(source, server.namesrv_address)
    assert result.code == 1
    assert result.last_error.startswith(sentence)
    assert result.err.count("\n  File ") <= 8, result.err
