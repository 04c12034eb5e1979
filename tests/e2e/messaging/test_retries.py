"""Retries of failed messages, and restarts of the broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.remoting import Client
from tests.interop.script import SCHEDULE_TOPIC
from tests.support.brokers import LocalServer
from tests.support.messaging import bodies, now_ms, send_v1_fields, wait_for_messages

pytestmark = pytest.mark.slow

LEVEL_1_MS, LEVEL_2_MS = 1_000, 5_000


# --- failed messages -----------------------------------------------------------------------------


def test_a_message_sent_back_is_redelivered_after_its_delay(
    client: Client, topic: str, group: str
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"try again", {"UNIQ_KEY": "U7", "KEYS": "k"})
    sent_back_ms = now_ms()
    client.expect(36, {"offset": sent.log_offset, "group": group, "delayLevel": 1})
    # This send creates the retry topic.
    client.send(f"%RETRY%{group}", b"by the client itself", reconsume_times=1)
    [record] = wait_for_messages(client, f"%RETRY%{group}", 1)
    assert record.body == b"try again"
    assert record.reconsume_times == 1
    assert record.properties["RETRY_TOPIC"] == topic
    assert record.properties["ORIGIN_MESSAGE_ID"] == sent.message_id
    assert record.properties["UNIQ_KEY"] == "U7"
    assert record.properties["DELAY"] == "1"
    assert LEVEL_1_MS <= record.stored_ms - sent_back_ms < LEVEL_2_MS


@pytest.mark.parametrize("first_delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "1000"}])
def test_a_message_that_is_sent_back_does_not_repeat_its_first_delay(
    client: Client, topic: str, group: str, first_delay: dict[str, str]
) -> None:
    client.create_group(group)
    client.send(topic, b"late", first_delay)
    [late] = wait_for_messages(client, topic, 0)
    client.expect(36, {"offset": late.log_offset, "group": group, "delayLevel": -1})
    [dead] = client.pull_all(f"%DLQ%{group}", 0)
    assert dead.body == b"late"
    client.expect(36, {"offset": late.log_offset, "group": group, "delayLevel": 2})
    [waiting] = client.pull_all(SCHEDULE_TOPIC, 1)[-1:]
    assert waiting.properties["REAL_TOPIC"] == f"%RETRY%{group}"
    assert waiting.properties["DELAY"] == "2"


@pytest.mark.parametrize(
    "changes",
    [{"delayLevel": -1}, {"delayLevel": 0, "maxReconsumeTimes": 0}],
    ids=["requested", "beyond the maximum"],
)
def test_a_message_beyond_the_maximum_becomes_a_dead_letter(
    client: Client, topic: str, group: str, changes: dict[str, object]
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"hopeless")
    client.expect(36, {"offset": sent.log_offset, "group": group, **changes})
    [record] = client.pull_all(f"%DLQ%{group}", 0)
    assert (record.body, record.reconsume_times) == (b"hopeless", 1)
    assert record.properties["RETRY_TOPIC"] == topic


def test_a_client_that_retries_too_often_itself_creates_a_dead_letter(
    client: Client, group: str
) -> None:
    client.create_group(group)
    fields = send_v1_fields(f"%RETRY%{group}", reconsumeTimes=17)
    client.expect(10, fields, b"hopeless")
    client.expect(10, {**fields, "reconsumeTimes": 3, "maxReconsumeTimes": 2}, b"hopeless too")
    assert bodies(client.pull_all(f"%DLQ%{group}", 0)) == [b"hopeless", b"hopeless too"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"group": "a/b"}, 26), ({"offset": 2**62}, 1), ({"offset": -1}, 1)],
)
def test_an_invalid_send_back_is_refused(
    client: Client, topic: str, group: str, changes: dict[str, object], code: int
) -> None:
    client.create_group(group)
    sent = client.send(topic, b"1")
    fields = {"offset": sent.log_offset, "group": group, "delayLevel": 1}
    assert client.request(36, {**fields, **changes}).code == code


# --- restarts ------------------------------------------------------------------------------------


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Run a broker for a single test."""
    with LocalServer(directory=tmp_path_factory.mktemp("own")) as server:
        yield server
    server.assert_clean()


def test_topics_groups_offsets_and_messages_survive_a_restart(own_broker: LocalServer) -> None:
    with own_broker.client() as client:
        client.create_topic("orders", queues=3)
        client.expect(200, body=b'{"groupName":"off","consumeEnable":false}')
        client.create_group("readers")
        client.send("auto", b"1", queue_id=3)
        client.send("orders", b"2", {"KEYS": "k"}, queue_id=2)
        client.commit_offset("readers", "orders", 2, 1)
    own_broker.restart()
    with own_broker.client() as client:
        assert client.pull("orders", 2, 0, group="off").code == 16
        assert client.request(10, send_v1_fields("orders", queueId=3), b"x").code == 29
        assert client.committed_offset("readers", "orders", 2) == 1
        assert bodies(client.pull_all("auto", 3)) == [b"1"]
        assert bodies(client.query_by_key("orders", "k")) == [b"2"]
        assert client.send("orders", b"3", queue_id=2).queue_offset == 1


def test_messages_due_while_the_broker_is_down_are_delivered_once_afterwards(
    own_broker: LocalServer,
) -> None:
    with own_broker.client() as client:
        client.create_topic("orders")
        client.send("orders", b"by time", {"TIMER_DELAY_MS": "200"}, queue_id=1)
        client.send("orders", b"by level", {"DELAY": "1"})
    own_broker.restart()
    with own_broker.client() as client:
        assert bodies(wait_for_messages(client, "orders", 0)) == [b"by level"]
    own_broker.restart()
    with own_broker.client() as client:
        client.send("orders", b"a second later", {"DELAY": "1"})
        assert bodies(wait_for_messages(client, "orders", 1)) == [b"a second later"]
        assert bodies(client.pull_all("orders", 0)) == [b"by level", b"a second later"]
        assert bodies(client.pull_all("orders", 1)) == [b"by time"]


def test_a_restart_does_not_repeat_a_timer_that_was_due_before_an_earlier_one(
    own_broker: LocalServer,
) -> None:
    """The first message is due in an hour. The second is due soon and must be delivered once."""
    with own_broker.client() as client:
        client.create_topic("orders")
        client.send("orders", b"in an hour", {"TIMER_DELAY_SEC": "3600"})
        client.send("orders", b"soon", {"TIMER_DELAY_MS": "100"})
        assert bodies(wait_for_messages(client, "orders", 0)) == [b"soon"]
    own_broker.restart()
    with own_broker.client() as client:
        client.send("orders", b"later", {"TIMER_DELAY_MS": "400"})
        wait_for_messages(client, "orders", 1)
        assert bodies(client.pull_all("orders", 0)) == [b"soon", b"later"]
