"""The sink's protocol against real brokers, without Spark: tasks and drivers are called by hand."""

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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    conf = {"transactionTimeOut": 1000}
    with Server(tmp_path_factory.mktemp("sink"), conf=conf, wait_s=90) as found:
        yield found


@pytest.fixture
def topic(served: Server, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:100]
    with served.client() as client:
        client.create_topic(name, queues=QUEUES)
    return name


def rows_in(client: Client, topic: str) -> list[str]:
    return [
        record.body.decode()
        for queue_id in range(QUEUES)
        for record in client.pull_all(topic, queue_id)
    ]


def assert_rows(served: Server, topic: str, expected: Iterable[str]) -> None:
    with served.client() as client:
        assert Counter(rows_in(client, topic)) == Counter(expected)


def test_an_epoch_is_there_when_it_is_committed_and_not_before(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    first = query.task("r1", 0, numbers(0, 100))
    second = query.task("r1", 0, numbers(100, 150), partition=1, attempt=1)
    assert_rows(served, topic, [])
    query.commit(0, first, second)
    assert_rows(served, topic, numbers(0, 150))
    query.commit(0, first, second)  # its answer was lost
    assert_rows(served, topic, numbers(0, 150))


def test_only_the_attempts_that_the_driver_names_count(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    query.task("r1", 0, numbers(0, 50), attempt=0)  # it was lost with its executor
    winner = query.task("r1", 0, numbers(0, 50), attempt=1)
    query.commit(0, winner)
    late = query.task("r1", 0, numbers(0, 50), attempt=2)  # speculation, and too slow
    assert late.is_decided
    assert_rows(served, topic, numbers(0, 50))
    query.commit(1, query.task("r1", 1, numbers(50, 60), attempt=3))
    assert_rows(served, topic, numbers(0, 60))


def test_an_epoch_that_is_run_again_writes_nothing(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    query.commit(0, query.task("r1", 0, numbers(0, 50)))
    again = query.task("r2", 0, numbers(0, 50))
    assert (again.is_decided, again.row_count) == (True, 0)
    query.commit(0, again)
    query.commit(1, query.task("r2", 1, numbers(50, 60)))
    assert_rows(served, topic, numbers(0, 60))


def test_a_driver_that_was_thought_dead_can_do_no_harm(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    asleep = query.task("r1", 0, numbers(0, 50))
    alive = query.task("r2", 0, numbers(0, 50))
    with pytest.raises(WriterFenced, match="run twice"):
        query.commit(0, asleep)
    query.abort(0, asleep)  # Spark does that: the living one must not suffer
    query.commit(0, alive)
    with pytest.raises(WriterFenced, match="run twice"):
        query.task("r1", 1, numbers(50, 60))
    query.commit(1, query.task("r2", 1, numbers(50, 60)))
    assert_rows(served, topic, numbers(0, 60))


def test_what_was_aborted_is_rolled_back_and_can_be_written_again(
    served: Server, topic: str
) -> None:
    query = Query(served.namesrv_address, topic)
    message = query.task("r1", 0, numbers(0, 50))
    query.abort(0, None, message)
    with pytest.raises(WriterFenced):
        query.commit(0, message)
    query.commit(0, query.task("r2", 0, numbers(0, 50)))
    query.abort(0, message)  # nothing: it is decided
    assert_rows(served, topic, numbers(0, 50))


def test_an_abort_after_a_commit_that_took_effect_takes_nothing_back(
    served: Server, topic: str
) -> None:
    query = Query(served.namesrv_address, topic)
    message = query.task("r1", 0, numbers(0, 50))
    query.commit(0, message)
    query.abort(0, message)
    query.commit(1, query.task("r1", 1, numbers(50, 60)))
    assert_rows(served, topic, numbers(0, 60))


def test_a_checkpoint_that_was_set_back_is_refused(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    for epoch in (0, 1):
        query.commit(epoch, query.task("r1", epoch, numbers(0, 5)))
    with pytest.raises(WriterFenced, match=r"epoch 0 of sink .* is past"):
        query.task("r2", 0, numbers(0, 5))


def test_two_queries_do_not_share_a_name(served: Server, topic: str) -> None:
    named = {"transactional.id": f"id-{topic}"}
    one = Query(served.namesrv_address, topic, "one", **named)
    other = Query(served.namesrv_address, topic, "other", **named)
    one.commit(0, one.task("r1", 0, numbers(0, 5)))
    with pytest.raises(WriterFenced, match="decided by another query"):
        other.task("r2", 0, numbers(0, 5))


def test_an_empty_epoch_needs_no_decision(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic)
    query.commit(0, query.task("r1", 0, []))
    query.commit(1, query.task("r1", 1, numbers(0, 5)))
    assert_rows(served, topic, numbers(0, 5))


def test_a_reader_sees_an_epoch_whole_or_not_at_all(served: Server, topic: str) -> None:
    """Big enough to be delivered in several pieces."""
    query = Query(served.namesrv_address, topic, batchbytes="200000")
    message = query.task("r1", 0, ["x" * 2000 + str(number) for number in range(6000)])
    seen: set[int] = set()
    looked, over = threading.Event(), threading.Event()

    def look() -> None:
        with served.client() as client:
            while not over.is_set() or not seen & {6000}:
                ends = [client.max_offset(topic, queue_id) for queue_id in range(QUEUES)]
                # Queue by queue, so asked again: what did not move in between was so at once.
                if ends == [client.max_offset(topic, queue_id) for queue_id in range(QUEUES)]:
                    seen.add(sum(ends))
                    looked.set()

    looking = threading.Thread(target=look)
    looking.start()
    looked.wait(60)
    query.commit(0, message)
    over.set()
    looking.join(60)
    assert seen == {0, 6000}


def test_a_broker_that_is_killed_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    with Server(tmp_path, wait_s=90) as served:
        with served.client() as client:
            client.create_topic("t", queues=QUEUES)
        query = Query(served.namesrv_address, "t")
        first = query.task("r1", 0, numbers(0, 50))
        served.kill()
        restart = threading.Timer(0.5, served.start)
        restart.start()
        query.commit(0, first)
        restart.join()
        second = query.task("r1", 1, numbers(50, 100))
        served.kill()
        served.start()
        query.commit(1, second)
        assert_rows(served, "t", numbers(0, 100))


def test_at_least_once_a_repeated_row_has_the_same_id(served: Server, topic: str) -> None:
    query = Query(served.namesrv_address, topic, guarantee="at-least-once")
    for run in ("r1", "r2"):
        query.commit(0, query.task(run, 0, numbers(0, 50)))
    with served.client() as client:
        records = [r for queue_id in range(QUEUES) for r in client.pull_all(topic, queue_id)]
    ids = Counter(record.properties["UNIQ_KEY"] for record in records)
    assert len(ids) == 50
    assert set(ids.values()) == {2}


def test_errors_say_what_to_do(served: Server, topic: str) -> None:
    with pytest.raises(ConfigError, match=r"use .mode"):
        batch_writer({"servers": served.namesrv_address, "topic": topic}, BODY, True)
    with pytest.raises(ConfigError, match="outputMode 'complete' is not possible"):
        stream_writer({"servers": served.namesrv_address, "topic": topic}, BODY, True)
    with pytest.raises(NotSent, match="check option servers"):
        stream_writer({"servers": "127.0.0.1:1", "topic": topic, "timeout": "1"}, BODY, False)
    assert isinstance(Query(served.namesrv_address, topic).writer(), StreamWriter)


def test_a_topic_that_is_missing_and_may_not_be_made_is_named(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"autoCreateTopicEnable": "false"}, wait_s=90) as served:
        query = Query(served.namesrv_address, "nobody-made-it", timeout="3")
        with pytest.raises(NoRoute, match="there is no topic nobody-made-it"):
            query.task("r1", 0, numbers(0, 5))


def test_what_a_broker_refuses_is_told(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"rejectTransactionMessage": "true"}, wait_s=90) as served:
        query = Query(served.namesrv_address, "t")
        with pytest.raises(RequestRefused, match="does not accept transactional messages"):
            query.task("r1", 0, numbers(0, 5))


# --- several brokers -----------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server, str]]:
    """Two brokers with one topic."""
    with ExitStack() as stack:
        names = stack.enter_context(Server(tmp_path / "names", role="namesrv", wait_s=90))
        brokers = []
        for name in ("broker-a", "broker-b"):
            conf = {"namesrvAddr": names.namesrv_address, "brokerName": name}
            broker = Server(tmp_path / name, role="broker", conf=conf, wait_s=90)
            brokers.append(stack.enter_context(broker))
            with broker.client() as client:
                client.create_topic("t", queues=QUEUES)
        with Client(names.namesrv_address) as client:
            # A broker registers a new topic a moment after it is created.
            wait_until(
                lambda: len((client.route("t") or {"brokerDatas": []})["brokerDatas"]) == 2,
                "the name server knows both brokers of the topic",
            )
        yield brokers[0], brokers[1], names.namesrv_address


def rows_at(broker: Server) -> Counter[str]:
    with broker.client() as client:
        return Counter(rows_in(client, "t"))


def test_an_epoch_on_two_brokers_is_finished_by_whoever_comes_next(
    pair: tuple[Server, Server, str],
) -> None:
    home, other, servers = pair
    query = Query(servers, "t", timeout="3")
    message = query.task("r1", 0, numbers(0, 100))
    assert set(message.parked_halves) == {"broker-a", "broker-b"}
    assert message.home_broker == "broker-a"
    hasty = query.writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        hasty.commit([message], 0)  # decided at home, and the other one does not answer
    query.abort(0, message)
    half = rows_at(home)
    assert half
    query = Query(servers, "t")
    again = query.task("r2", 0, numbers(0, 100))
    assert again.is_decided
    query.commit(0, again)
    assert rows_at(home) + rows_at(other) == Counter(numbers(0, 100))


def test_the_next_epoch_finishes_the_last_one_first(pair: tuple[Server, Server, str]) -> None:
    home, other, servers = pair
    message = Query(servers, "t").task("r1", 0, numbers(0, 100))
    hasty = Query(servers, "t", timeout="2").writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        hasty.commit([message], 0)
    assert rows_at(home)
    query = Query(servers, "t")
    later = query.task("r2", 1, numbers(100, 200))
    query.commit(1, later)
    assert rows_at(home) + rows_at(other) == Counter(numbers(0, 200))


def test_the_home_of_a_sink_stays_where_it_was(pair: tuple[Server, Server, str]) -> None:
    home, other, servers = pair
    query = Query(servers, "t")
    query.commit(0, query.task("r1", 0, numbers(0, 50)))
    home.stop()
    with pytest.raises((ConfigError, NotSent, NoRoute), match="broker"):
        Query(servers, "t", timeout="2").task("r2", 1, numbers(50, 100))
    home.start()
    query.commit(1, query.task("r3", 1, numbers(50, 100)))
    assert rows_at(home) + rows_at(other) == Counter(numbers(0, 100))


def test_an_epoch_that_needs_one_broker_does_not_forget_the_other(
    pair: tuple[Server, Server, str],
) -> None:
    home, other, servers = pair
    with home.client() as client:
        client.create_topic("at-home", queues=QUEUES)
    named = {"transactional.id": "job"}
    message = Query(servers, "t", **named).task("r1", 0, numbers(0, 100))
    hasty = Query(servers, "t", timeout="2", **named).writer()
    with other.frozen(), pytest.raises(OutcomeUnknown, match="no response to"):
        hasty.commit([message], 0)
    later = Query(servers, "at-home", **named)
    later.commit(1, later.task("r2", 1, numbers(0, 10)))
    assert rows_at(home) + rows_at(other) == Counter(numbers(0, 100))
