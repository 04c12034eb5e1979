"""The sink's protocol with real brokers, without Spark: the tests call tasks and drivers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from escrowmq.errors import (
    ConfigError,
    NoRoute,
    NotSent,
    OutcomeUnknown,
    RequestRefused,
    WriterFenced,
)
from escrowmq.spark.writers import StreamWriter, batch_writer, stream_writer
from tests.interop.remoting import Client
from tests.support.brokers import Server
from tests.support.spark_sinks import BODY, Query, numbers
from tests.support.waiting import wait_until

QUEUES = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    conf = {"transactionTimeOut": 1000}
    with Server(tmp_path_factory.mktemp("sink"), conf=conf, wait_s=90) as server:
        yield server


@pytest.fixture
def topic(server: Server, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:100]
    with server.client() as client:
        client.create_topic(name, queues=QUEUES)
    return name


def rows_in(client: Client, topic: str) -> list[str]:
    return [
        record.body.decode()
        for queue_id in range(QUEUES)
        for record in client.pull_all(topic, queue_id)
    ]


def assert_rows(server: Server, topic: str, expected: Iterable[str]) -> None:
    with server.client() as client:
        assert Counter(rows_in(client, topic)) == Counter(expected)


def test_an_epoch_is_visible_only_after_its_commit(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    first = query.task("r1", 0, numbers(0, 100))
    second = query.task("r1", 0, numbers(100, 150), partition=1, attempt=1)
    assert_rows(server, topic, [])
    query.commit(0, first, second)
    assert_rows(server, topic, numbers(0, 150))
    query.commit(0, first, second)  # repeated, as after a lost response
    assert_rows(server, topic, numbers(0, 150))


def test_only_the_attempts_that_the_driver_names_are_committed(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    query.task("r1", 0, numbers(0, 50), attempt=0)  # lost with its executor
    winner = query.task("r1", 0, numbers(0, 50), attempt=1)
    query.commit(0, winner)
    late = query.task("r1", 0, numbers(0, 50), attempt=2)  # a slow speculative attempt
    assert late.is_decided
    assert_rows(server, topic, numbers(0, 50))
    query.commit(1, query.task("r1", 1, numbers(50, 60), attempt=3))
    assert_rows(server, topic, numbers(0, 60))


def test_a_repeated_epoch_writes_nothing(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    query.commit(0, query.task("r1", 0, numbers(0, 50)))
    repeated = query.task("r2", 0, numbers(0, 50))
    assert (repeated.is_decided, repeated.row_count) == (True, 0)
    query.commit(0, repeated)
    query.commit(1, query.task("r2", 1, numbers(50, 60)))
    assert_rows(server, topic, numbers(0, 60))


def test_a_replaced_driver_is_fenced(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    replaced = query.task("r1", 0, numbers(0, 50))
    current = query.task("r2", 0, numbers(0, 50))
    with pytest.raises(WriterFenced, match="run twice"):
        query.commit(0, replaced)
    query.abort(0, replaced)  # as Spark does; it must not roll back the current attempt
    query.commit(0, current)
    with pytest.raises(WriterFenced, match="run twice"):
        query.task("r1", 1, numbers(50, 60))
    query.commit(1, query.task("r2", 1, numbers(50, 60)))
    assert_rows(server, topic, numbers(0, 60))


def test_an_aborted_epoch_is_rolled_back_and_can_be_repeated(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    message = query.task("r1", 0, numbers(0, 50))
    query.abort(0, None, message)
    with pytest.raises(WriterFenced):
        query.commit(0, message)
    query.commit(0, query.task("r2", 0, numbers(0, 50)))
    query.abort(0, message)  # has no effect: the epoch is decided
    assert_rows(server, topic, numbers(0, 50))


def test_an_abort_after_a_commit_has_no_effect(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    message = query.task("r1", 0, numbers(0, 50))
    query.commit(0, message)
    query.abort(0, message)
    query.commit(1, query.task("r1", 1, numbers(50, 60)))
    assert_rows(server, topic, numbers(0, 60))


def test_an_older_checkpoint_is_refused(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    for epoch in (0, 1):
        query.commit(epoch, query.task("r1", epoch, numbers(0, 5)))
    with pytest.raises(WriterFenced, match=r"epoch 0 of sink .* is past"):
        query.task("r2", 0, numbers(0, 5))


def test_two_queries_cannot_share_a_transactional_id(server: Server, topic: str) -> None:
    options = {"transactional.id": f"id-{topic}"}
    first = Query(server.namesrv_address, topic, "first", **options)
    second = Query(server.namesrv_address, topic, "second", **options)
    first.commit(0, first.task("r1", 0, numbers(0, 5)))
    with pytest.raises(WriterFenced, match="decided by another query"):
        second.task("r2", 0, numbers(0, 5))


def test_an_empty_epoch_needs_no_decision(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic)
    query.commit(0, query.task("r1", 0, []))
    query.commit(1, query.task("r1", 1, numbers(0, 5)))
    assert_rows(server, topic, numbers(0, 5))


def test_an_epoch_becomes_visible_at_once(server: Server, topic: str) -> None:
    """A reader sees all messages of the epoch or none. It is too large for one append."""
    query = Query(server.namesrv_address, topic, batchbytes="200000")
    message = query.task("r1", 0, ["x" * 2000 + str(number) for number in range(6000)])
    counts: set[int] = set()
    has_counted, is_committed = threading.Event(), threading.Event()

    def count_messages() -> None:
        with server.client() as client:
            while not is_committed.is_set() or 6000 not in counts:
                ends = [client.max_offset(topic, queue_id) for queue_id in range(QUEUES)]
                # Each queue takes a request. Offsets that are the same in a second reading were
                # all valid at one moment.
                if ends == [client.max_offset(topic, queue_id) for queue_id in range(QUEUES)]:
                    counts.add(sum(ends))
                    has_counted.set()

    counting = threading.Thread(target=count_messages)
    counting.start()
    assert has_counted.wait(60)
    query.commit(0, message)
    is_committed.set()
    counting.join(60)
    assert counts == {0, 6000}


def test_a_commit_waits_for_a_broker_that_is_killed_and_restarted(tmp_path: Path) -> None:
    with Server(tmp_path, wait_s=90) as server:
        with server.client() as client:
            client.create_topic("t", queues=QUEUES)
        query = Query(server.namesrv_address, "t")
        first = query.task("r1", 0, numbers(0, 50))
        server.kill()
        restart = threading.Timer(0.5, server.start)  # during the commit
        restart.start()
        query.commit(0, first)
        restart.join()
        second = query.task("r1", 1, numbers(50, 100))
        server.kill()
        server.start()
        query.commit(1, second)
        assert_rows(server, "t", numbers(0, 100))


def test_at_least_once_a_repeated_row_has_the_same_id(server: Server, topic: str) -> None:
    query = Query(server.namesrv_address, topic, guarantee="at-least-once")
    for run in ("r1", "r2"):
        query.commit(0, query.task(run, 0, numbers(0, 50)))
    with server.client() as client:
        records = [
            record for queue_id in range(QUEUES) for record in client.pull_all(topic, queue_id)
        ]
    ids = Counter(record.properties["UNIQ_KEY"] for record in records)
    assert len(ids) == 50
    assert set(ids.values()) == {2}


def test_invalid_writers_are_refused_with_what_to_do(server: Server, topic: str) -> None:
    with pytest.raises(ConfigError, match=r"use .mode"):
        batch_writer({"servers": server.namesrv_address, "topic": topic}, BODY, True)
    with pytest.raises(ConfigError, match=r"outputMode 'update' or 'complete' use .foreachBatch"):
        stream_writer({"servers": server.namesrv_address, "topic": topic}, BODY, True)
    with pytest.raises(NotSent, match="check option servers"):
        stream_writer({"servers": "127.0.0.1:1", "topic": topic, "timeout": "1"}, BODY, False)
    assert isinstance(Query(server.namesrv_address, topic).writer(), StreamWriter)


def test_a_missing_topic_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"autoCreateTopicEnable": "false"}, wait_s=90) as server:
        query = Query(server.namesrv_address, "missing", timeout="3")
        with pytest.raises(NoRoute, match="there is no topic missing"):
            query.task("r1", 0, numbers(0, 5))


def test_a_refusal_by_the_broker_reaches_the_user(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"rejectTransactionMessage": "true"}, wait_s=90) as server:
        query = Query(server.namesrv_address, "t")
        with pytest.raises(RequestRefused, match="does not accept transactional messages"):
            query.task("r1", 0, numbers(0, 5))


# --- several brokers -----------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server, str]]:
    """Run two brokers that both have the topic. Yields them and the name server's address."""
    with ExitStack() as stack:
        name_server = stack.enter_context(
            Server(tmp_path / "name_server", role="namesrv", wait_s=90)
        )
        brokers = []
        for name in ("broker-a", "broker-b"):
            conf = {"namesrvAddr": name_server.namesrv_address, "brokerName": name}
            broker = Server(tmp_path / name, role="broker", conf=conf, wait_s=90)
            brokers.append(stack.enter_context(broker))
            with broker.client() as client:
                client.create_topic("t", queues=QUEUES)
        with Client(name_server.namesrv_address) as client:
            # A broker registers a new topic a moment after it is created.
            wait_until(
                lambda: len((client.route("t") or {"brokerDatas": []})["brokerDatas"]) == 2,
                "both brokers are in the route of the topic",
            )
        yield brokers[0], brokers[1], name_server.namesrv_address


def rows_on(broker: Server) -> Counter[str]:
    with broker.client() as client:
        return Counter(rows_in(client, "t"))


def test_an_epoch_on_two_brokers_is_finished_by_the_next_run(
    pair: tuple[Server, Server, str],
) -> None:
    home, other, servers = pair
    query = Query(servers, "t", timeout="3")
    message = query.task("r1", 0, numbers(0, 100))
    assert set(message.parked_halves) == {"broker-a", "broker-b"}
    assert message.home_broker == "broker-a"
    impatient = query.writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        impatient.commit([message], 0)  # decided at home; the other broker does not respond
    query.abort(0, message)
    assert rows_on(home)
    query = Query(servers, "t")
    repeated = query.task("r2", 0, numbers(0, 100))
    assert repeated.is_decided
    query.commit(0, repeated)
    assert rows_on(home) + rows_on(other) == Counter(numbers(0, 100))


def test_the_next_epoch_first_finishes_the_epoch_before(pair: tuple[Server, Server, str]) -> None:
    home, other, servers = pair
    message = Query(servers, "t").task("r1", 0, numbers(0, 100))
    impatient = Query(servers, "t", timeout="2").writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        impatient.commit([message], 0)
    assert rows_on(home)
    query = Query(servers, "t")
    later = query.task("r2", 1, numbers(100, 200))
    query.commit(1, later)
    assert rows_on(home) + rows_on(other) == Counter(numbers(0, 200))


def test_a_sink_keeps_its_home_broker(pair: tuple[Server, Server, str]) -> None:
    home, other, servers = pair
    query = Query(servers, "t")
    query.commit(0, query.task("r1", 0, numbers(0, 50)))
    home.stop()
    with pytest.raises((ConfigError, NotSent, NoRoute), match="broker"):
        Query(servers, "t", timeout="2").task("r2", 1, numbers(50, 100))
    home.start()
    query.commit(1, query.task("r3", 1, numbers(50, 100)))
    assert rows_on(home) + rows_on(other) == Counter(numbers(0, 100))


def test_an_epoch_on_one_broker_also_finishes_the_epoch_before_on_the_other(
    pair: tuple[Server, Server, str],
) -> None:
    home, other, servers = pair
    with home.client() as client:
        client.create_topic("at-home", queues=QUEUES)
    options = {"transactional.id": "job"}
    message = Query(servers, "t", **options).task("r1", 0, numbers(0, 100))
    impatient = Query(servers, "t", timeout="2", **options).writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        impatient.commit([message], 0)
    later = Query(servers, "at-home", **options)
    later.commit(1, later.task("r2", 1, numbers(0, 10)))
    assert rows_on(home) + rows_on(other) == Counter(numbers(0, 100))
