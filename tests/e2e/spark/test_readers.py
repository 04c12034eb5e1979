"""The readers as Spark uses them, against a real broker, without a JVM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from escrowmq.client.access import NO_ACCESS
from escrowmq.clock import ManualClock
from escrowmq.errors import DataLost, InvalidOption, NoRoute, NotSent, RequestRefused
from escrowmq.message.properties import encode_properties
from escrowmq.spark import options
from escrowmq.spark.data_source import EscrowSource, RocketMQSource
from escrowmq.spark.queues import ReadCluster
from escrowmq.spark.readers import StreamReader
from escrowmq.spark.schema import MESSAGE_COLUMNS
from tests.interop.remoting import COMMIT, ROLLBACK, Client
from tests.support.brokers import Served
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ALL = ReadAllAvailable()
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("readers")) as served:
        yield served


_opened: list[StreamReader] = []


@pytest.fixture(autouse=True)
def _readers_are_stopped() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().stop()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with served.client() as client:
        yield client


def send(client: Client, topic: str, count: int, *, queues: int = 2, first: int = 0) -> None:
    for number in range(first, first + count):
        given = {"UNIQ_KEY": f"{topic}-{number}", "TAGS": "ab"[number % 2]}
        client.send(topic, b"%d " % number * 20, given, queue_id=number % queues)


def source_of(served: Served, **given: object) -> EscrowSource:
    told = {"servers": served.namesrv_address, **given}
    return EscrowSource({name: str(value) for name, value in told.items()})


def read(served: Served, **given: object) -> Rows:
    source = source_of(served, **given)
    reader = source.reader(source.schema())
    tasks = pickle.loads(pickle.dumps(reader.partitions()))
    reader = pickle.loads(pickle.dumps(reader))
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def ids(rows: Rows) -> set[str]:
    found = [row["message_id"] for row in rows]
    assert len(set(found)) == len(found), "a message came twice"
    return set(found)


def numbers(topic: str, *which: int) -> set[str]:
    return {f"{topic}-{number}" for number in which}


# --- batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"pullBatchSize": 7}, {"minPartitions": 5}])
def test_everything_is_read_once_and_each_queue_in_order(
    served: Served, client: Client, given: dict[str, object]
) -> None:
    topic = "-".join(("batch", *given))
    client.create_topic(topic, queues=2)
    send(client, topic, 150)
    rows = read(served, subscribe=topic, **given)
    assert ids(rows) == numbers(topic, *range(150))
    for queue_id in (0, 1):
        offsets = [row["queue_offset"] for row in rows if row["queue_id"] == queue_id]
        assert offsets == list(range(75))
    assert {row["broker"] for row in rows} == {"broker-a"}


def test_messages_of_every_size_are_read_in_windows(served: Served, client: Client) -> None:
    client.create_topic("sizes", queues=1)
    sizes = [1, 900_000, 5, 400_000, 400_000, 400_000, 1_500_000, *range(60), 1_200_000, 2]
    for number, size in enumerate(sizes):
        client.send("sizes", bytes([number]) * size, {"UNIQ_KEY": f"sizes-{number}"})
    rows = read(served, subscribe="sizes", columns="body,queue_offset")
    assert [len(row["body"]) for row in rows] == sizes
    assert [row["queue_offset"] for row in rows] == list(range(len(sizes)))


def test_offsets_times_and_queues_can_be_chosen(served: Served, client: Client) -> None:
    client.create_topic("chosen", queues=2)
    send(client, "chosen", 10)
    by_queue = {"chosen": {"broker-a": {"0": 2, "1": -2}}}
    until = {"chosen": {"broker-a": {"0": 4, "1": 1}}}
    rows = read(
        served,
        subscribe="chosen",
        startingOffsets=json.dumps(by_queue),
        endingOffsets=json.dumps(until),
    )
    assert ids(rows) == numbers("chosen", 4, 6, 1)
    assert ids(read(served, assign='{"chosen": {"broker-a": [1]}}')) == numbers(
        "chosen", 1, 3, 5, 7, 9
    )
    rows = sorted(read(served, subscribe="chosen"), key=lambda row: row["log_offset"])
    middle = int(rows[5]["store_time"].timestamp() * 1000)
    later = [row for row in rows if row["store_time"] >= rows[5]["store_time"]]
    assert ids(read(served, subscribe="chosen", startingTimestamp=middle)) == ids(later)
    before = [row for row in rows if row["store_time"] < rows[5]["store_time"]]
    assert ids(read(served, subscribe="chosen", endingTimestamp=middle)) == ids(before)
    assert read(served, subscribe="chosen", startingTimestamp=middle + 10**9) == []


def test_a_pattern_finds_topics_and_no_system_topics(served: Served, client: Client) -> None:
    for topic in ("like-one", "like-two", "unlike"):
        client.create_topic(topic, queues=1)
        send(client, topic, 2, queues=1)
    assert ids(read(served, subscribePattern="like-.*")) == {
        *numbers("like-one", 0, 1),
        *numbers("like-two", 0, 1),
    }
    topics = {row["topic"] for row in read(served, subscribePattern=".*")}
    assert {"like-one", "unlike"} <= topics
    assert not any(topic.startswith("RMQ_SYS") for topic in topics)


def test_a_pattern_finds_topics_whose_names_resemble_those_of_a_broker(
    served: Served, client: Client
) -> None:
    for topic in ("broker-events", "orders_REPLY_TOPIC"):
        client.create_topic(topic, queues=1)
        send(client, topic, 1, queues=1)
    topics = {row["topic"] for row in read(served, subscribePattern=".*")}
    assert {"broker-events", "orders_REPLY_TOPIC"} <= topics


def test_a_pattern_finds_no_topics_of_brokers_and_clusters(tmp_path: Path) -> None:
    conf = {"brokerName": "edge-1", "brokerClusterName": "Shop"}
    with Served(tmp_path, conf=conf) as served, served.client() as client:
        client.create_topic("orders")
        with ReadCluster(served.namesrv_address, NO_ACCESS) as cluster:
            wait_until(lambda: "orders" in cluster.topics(), "the name server has the topic")
            assert {"edge-1", "Shop", "Shop_REPLY_TOPIC"} <= set(cluster.topics())
            assert cluster.topics_matching(".*", include_system=False) == ["orders"]


def test_tags_are_compared_as_text_and_not_only_as_hashes(served: Served, client: Client) -> None:
    client.create_topic("tags", queues=1)
    for number, tag in enumerate(["Aa", "BB", "cc", "Aa"] * 30):  # Java hashes Aa and BB alike
        client.send("tags", b"", {"UNIQ_KEY": f"tags-{number}", "TAGS": tag})
    rows = read(served, subscribe="tags", tags="Aa || cc", minPartitions=3)
    assert ids(rows) == numbers("tags", *(n for n in range(120) if n % 4 != 1))


def test_offsets_that_are_not_there_are_refused_or_cut(served: Served, client: Client) -> None:
    client.create_topic("short", queues=1)
    send(client, "short", 3, queues=1)
    beyond = json.dumps({"short": {"broker-a": {"0": 9}}})
    with pytest.raises(DataLost, match="only 0 to 3 exist"):
        read(served, subscribe="short", endingOffsets=beyond)
    assert len(read(served, subscribe="short", endingOffsets=beyond, failOnDataLoss=False)) == 3
    strange = json.dumps({"short": {"broker-a": {"7": 0}}})
    with pytest.raises(InvalidOption, match="short broker-a:7"):
        read(served, subscribe="short", startingOffsets=strange)


def test_what_cannot_be_asked_for_is_said(served: Served, client: Client) -> None:
    client.create_topic("orders", queues=1)
    send(client, "orders", 1, queues=1)
    with pytest.raises(NoRoute, match=r"no broker has a topic 'order'; did you mean orders\?"):
        read(served, subscribe="order")
    with pytest.raises(RequestRefused, match="SQL92"):
        read(served, subscribe="orders", sql="a > 1")
    [port] = free_ports(1)
    with pytest.raises(NotSent, match=rf"no name server.*127.0.0.1:{port} cannot be reached"):
        read(served, servers=f"127.0.0.1:{port}", subscribe="orders")
    with pytest.raises(InvalidOption, match="there is no queue"):
        read(served, assign='{"orders": {"broker-a": [5]}}')


def test_an_empty_topic_is_an_empty_table(served: Served, client: Client) -> None:
    client.create_topic("empty", queues=3)
    assert read(served, subscribe="empty") == []


def test_a_name_server_that_is_down_is_stepped_over(served: Served, client: Client) -> None:
    client.create_topic("names", queues=1)
    send(client, "names", 1, queues=1)
    [port] = free_ports(1)
    servers = f"127.0.0.1:{port};{served.namesrv_address}"
    assert len(read(served, servers=servers, subscribe="names")) == 1


def test_the_other_name_is_the_same_source() -> None:
    assert (EscrowSource.name(), RocketMQSource.name()) == ("escrowmq", "rocketmq")


def test_transactions_are_read_from_brokers_and_from_files(served: Served, client: Client) -> None:
    client.create_topic("paid", queues=1)
    halves = [client.send_half("paid", b"x", {"UNIQ_KEY": f"tx{n}"}) for n in range(3)]
    client.end_transaction(halves[0], COMMIT, topic="paid")
    client.end_transaction(halves[1], ROLLBACK, topic="paid")

    def story(rows: Rows) -> dict[str, str | None]:
        mine = {row["half_offset"]: row for row in rows if row["topic"] == "paid"}
        ended = {row["half_offset"]: row["verdict"] for row in rows if row["kind"] == "op"}
        return {row["transaction_id"]: ended.get(at) for at, row in mine.items()}

    expected = {"tx0": "committed", "tx1": "rolled_back", "tx2": None}
    assert story(read(served, mode="transactions")) == expected
    source = EscrowSource({"path": str(served.data), "mode": "transactions"})
    reader: Any = source.reader(source.schema())
    rows = [row for t in reader.partitions() for b in reader.read(t) for row in b.to_pylist()]
    assert story(rows) == expected
    [final] = read(served, subscribe="paid")
    assert (final["transaction_id"], final["prepared_offset"]) == ("tx0", halves[0].log_offset)


# --- stream --------------------------------------------------------------------------------------


class Stream:
    """A reader as Spark drives it: offsets go through JSON, tasks through pickle."""

    def __init__(self, served: Served, **given: object) -> None:
        told = {"servers": served.namesrv_address, **given}
        chosen = options.parse_read_options({k: str(v) for k, v in told.items()}, is_stream=True)
        self.clock = ManualClock()
        self.reader = StreamReader(chosen, MESSAGE_COLUMNS, clock=self.clock)
        _opened.append(self.reader)

    def initial(self) -> Any:
        return _through_json(self.reader.initialOffset())

    def latest(self, start: Any, limit: Any = ALL) -> Any:
        self.clock.advance(ms=10_000)  # nothing is answered from memory
        return _through_json(self.reader.latestOffset(start, limit))

    def rows(self, start: Any, end: Any) -> Rows:
        self.clock.advance(ms=10_000)
        tasks = pickle.loads(pickle.dumps(self.reader.partitions(start, end)))
        return [row for t in tasks for b in self.reader.read(t) for row in b.to_pylist()]


def _through_json(offset: Any) -> Any:
    written = json.dumps(offset)
    assert written == json.dumps(offset, sort_keys=True), "Spark compares offsets as text"
    return json.loads(written)


def test_a_stream_goes_on_where_it_was(served: Served, client: Client) -> None:
    client.create_topic("flow", queues=2)
    send(client, "flow", 4)
    stream = Stream(served, subscribe="flow", startingOffsets="earliest")
    start = stream.initial()
    end = stream.latest(start)
    assert ids(stream.rows(start, end)) == numbers("flow", *range(4))
    assert stream.latest(end) == end
    assert stream.rows(end, end) == []
    send(client, "flow", 3, first=4)
    following = stream.latest(end)
    assert ids(Stream(served, subscribe="flow").rows(end, following)) == numbers("flow", 4, 5, 6)


def test_a_crash_in_the_first_batch_loses_nothing_that_came_after_latest(
    served: Served, client: Client
) -> None:
    client.create_topic("crash", queues=2)
    send(client, "crash", 4)
    first = Stream(served, subscribe="crash")
    start = first.initial()
    send(client, "crash", 3, first=4)
    end = first.latest(start)
    send(client, "crash", 5, first=7)
    # Only the end is in the checkpoint; a new driver asks for the start again, and it is another.
    second = Stream(served, subscribe="crash")
    again = second.initial()
    assert again != start
    assert ids(second.rows(again, end)) == numbers("crash", 4, 5, 6)
    assert ids(second.rows(end, second.latest(end))) == numbers("crash", *range(7, 12))


def test_a_group_pins_the_start_and_follows_if_it_is_wished(served: Served, client: Client) -> None:
    client.create_topic("pinned", queues=1)
    send(client, "pinned", 2, queues=1)
    given: dict[str, object] = {"subscribe": "pinned", "group": "pinners", "reportOffsets": True}
    start = Stream(served, **given).initial()
    assert start["first"] == {"pinned": {"broker-a": {"0": 2}}}
    send(client, "pinned", 3, first=2, queues=1)
    stream = Stream(served, **given)
    assert stream.initial() == start
    end = stream.latest(start)
    assert ids(stream.rows(start, end)) == numbers("pinned", 2, 3, 4)
    stream.reader.commit(end)
    fields = {"consumerGroup": "pinners", "topic": "pinned", "queueId": 0}
    assert client.expect(14, fields).ext_fields["offset"] == "5"


def test_a_limit_is_shared_by_the_queues_and_never_passed(served: Served, client: Client) -> None:
    client.create_topic("limit", queues=2)
    send(client, "limit", 40)
    send(client, "limit", 20, queues=1)
    stream = Stream(served, subscribe="limit", startingOffsets="earliest", maxOffsetsPerTrigger=25)
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(25)
    at, counts = stream.initial(), []
    while (end := stream.latest(at, ReadMaxRows(25))) != at:
        counts.append(len(stream.rows(at, end)))
        at = end
    assert counts == [25, 25, 10]
    start = stream.initial()
    some = stream.rows(start, stream.latest(start, ReadMaxBytes(2_000)))
    assert 0 < len(some) < 30


def test_available_now_ends_with_what_was_there(served: Served, client: Client) -> None:
    client.create_topic("now", queues=1)
    send(client, "now", 5, queues=1)
    stream = Stream(served, subscribe="now", startingOffsets="earliest")
    stream.reader.prepareForTriggerAvailableNow()
    send(client, "now", 5, first=5, queues=1)
    start = stream.initial()
    end = stream.latest(start, ReadMaxRows(3))
    last = stream.latest(end, ReadMaxRows(3))
    assert ids(stream.rows(start, end) + stream.rows(end, last)) == numbers("now", *range(5))
    assert stream.latest(last, ReadMaxRows(3)) == last
    assert stream.reader.reportLatestOffset()["next"] == {"now": {"broker-a": {"0": 10}}}


def test_new_topics_and_queues_are_read_from_their_first_message(
    served: Served, client: Client
) -> None:
    client.create_topic("grow-a", queues=1)
    stream = Stream(served, subscribePattern="grow-.*")
    start = stream.initial()
    client.create_topic("grow-a", queues=2)
    client.create_topic("grow-b", queues=1)
    send(client, "grow-a", 4)
    send(client, "grow-b", 2, queues=1)
    end = stream.latest(start)
    expected = numbers("grow-a", *range(4)) | numbers("grow-b", 0, 1)
    assert ids(stream.rows(start, end)) == expected
    # And the checkpoint alone says so, whatever a new driver takes for the start.
    assert ids(Stream(served, subscribePattern="grow-.*").rows(stream.initial(), end)) == expected


def test_a_range_that_is_gone_fails_the_stream_or_is_left_out(
    served: Served, client: Client
) -> None:
    client.create_topic("gone", queues=1)
    send(client, "gone", 3, queues=1)
    stream = Stream(served, subscribe="gone")
    nothing: Any = {"first": {}, "next": {}}
    beyond = {"first": {"gone": {"broker-a": {"0": 1}}}, "next": {"gone": {"broker-a": {"0": 8}}}}
    with pytest.raises(DataLost, match="messages 1 to 8 are requested, but only 0 to 3 exist"):
        stream.rows(nothing, beyond)
    elsewhere = {"first": {}, "next": {"gone": {"broker-z": {"0": 8}}}}
    with pytest.raises(DataLost, match="broker-z:0 is gone"):
        stream.rows(nothing, elsewhere)
    careless = Stream(served, subscribe="gone", failOnDataLoss=False)
    assert ids(careless.rows(nothing, beyond)) == numbers("gone", 1, 2)
    assert careless.rows(nothing, elsewhere) == []


def test_an_answer_is_remembered_for_a_moment(served: Served, client: Client) -> None:
    client.create_topic("moment", queues=1)
    stream = Stream(served, subscribe="moment", startingOffsets="earliest")
    start = stream.initial()
    assert stream.latest(start) == start
    send(client, "moment", 1, queues=1)
    assert stream.reader.latestOffset(start, ALL) == start
    assert stream.latest(start) != start


def test_a_broker_that_was_restarted_is_found_again(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        with served.client() as client:
            client.create_topic("again", queues=1)
            send(client, "again", 2, queues=1)
        stream = Stream(served, subscribe="again", startingOffsets="earliest")
        start = stream.initial()
        served.restart()
        end = stream.latest(start)
        assert ids(stream.rows(start, end)) == numbers("again", 0, 1)


def test_properties_with_odd_names_come_through(served: Served, client: Client) -> None:
    client.create_topic("odd", queues=1)
    given = {"UNIQ_KEY": "odd-0", "größe": "4 µm", "KEYS ": "no keys"}
    assert encode_properties(given)
    client.send("odd", b"", given)
    [row] = read(served, subscribe="odd")
    assert dict(row["properties"])["größe"] == "4 µm"
    assert row["keys"] is None
