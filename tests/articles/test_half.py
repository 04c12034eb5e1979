"""The half message: what makes a send one, and how the broker stores it.

50 `Boolean.parseBoolean(TRAN_MSG)` decides: "true" in any case.
   test_a_send_with_tran_msg_in_any_case_is_a_half
51 A retry with a delay is no half, whatever its TRAN_MSG.
   test_a_retry_with_a_delay_is_no_half
52 With `rejectTransactionMessage` halves are refused with NO_PERMISSION.
   test_a_broker_that_rejects_transactions_refuses_halves_only
53 Other messages are stored as usual.
   test_a_send_without_the_mark_is_an_ordinary_message
54 The property REAL_TOPIC has the topic of the send.
   test_the_half_has_the_topic_and_the_queue_of_the_send_as_properties
55 The property REAL_QID has its queue.
   test_the_half_has_the_topic_and_the_queue_of_the_send_as_properties
56 The transaction type in the sysFlag is reset.
   test_the_half_has_no_transaction_type
57 The half is stored in RMQ_SYS_TRANS_HALF_TOPIC.
   test_every_half_is_in_queue_0_of_the_half_topic
58 It is stored in queue 0, the only one.
   test_every_half_is_in_queue_0_of_the_half_topic
59 It is stored like any message, with body and properties.
   test_the_half_has_body_and_properties_of_the_send
60 The response is that of any send; its offset is the place in the half queue.
   test_the_response_has_the_requested_queue_and_the_offset_in_the_half_queue
61 Delayed messages are stored with the same trick.
   test_a_delayed_message_has_its_topic_and_queue_as_properties_too
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.interop.producers import GROUP, TOPIC, Producer, unique_key
from tests.interop.remoting import HALF_TOPIC, PREPARED
from tests.support.broker_requests import send_request
from tests.support.escrows import ESCROW, EscrowBench, half_request
from tests.support.raw_transactions import send_half

pytestmark = pytest.mark.slow

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
NO_PERMISSION = 16
TRANSACTION_TYPE_BITS = 12


def topic_of_marked_send(
    producer: Producer, name: str, mark: str, *, sys_flag: int, reconsume_times: int = 0
) -> str:
    """Send a message with this TRAN_MSG and return the topic in which it is stored."""
    properties = {"UNIQ_KEY": unique_key(name), "PGROUP": GROUP, "TRAN_MSG": mark}
    if reconsume_times:
        properties["DELAY"] = "1"
    result = producer.client.send(
        *(TOPIC, name.encode(), properties),
        group=GROUP,
        sys_flag=sys_flag,
        reconsume_times=reconsume_times,
    )
    return producer.client.view_by_id(result.message_id).topic


@pytest.mark.parametrize("sys_flag", [0, PREPARED])
@pytest.mark.parametrize("mark", ["true", "True", "TRUE", "tRuE"])
def test_a_send_with_tran_msg_in_any_case_is_a_half(
    producer: Producer, mark: str, sys_flag: int
) -> None:
    name = f"marked {mark} {sys_flag}"
    assert topic_of_marked_send(producer, name, mark, sys_flag=sys_flag) == HALF_TOPIC


@pytest.mark.parametrize("mark", ["false", "yes", "1", " true"])
def test_a_send_without_the_mark_is_an_ordinary_message(producer: Producer, mark: str) -> None:
    assert topic_of_marked_send(producer, f"marked {mark}", mark, sys_flag=0) == TOPIC


def test_a_retry_with_a_delay_is_no_half(producer: Producer) -> None:
    topic = topic_of_marked_send(producer, "a retry", "true", sys_flag=0, reconsume_times=1)
    assert topic == SCHEDULE_TOPIC


def test_a_broker_that_rejects_transactions_refuses_halves_only() -> None:
    bench = EscrowBench(config=replace(ESCROW, refuses_halves=True))
    assert bench.request(half_request("k")).code == NO_PERMISSION
    assert bench.request(send_request(body=b"ordinary")).code == 0
    assert (bench.messages(HALF_TOPIC), bench.bodies()) == ([], [b"ordinary"])


def test_the_half_has_the_topic_and_the_queue_of_the_send_as_properties(
    producer: Producer,
) -> None:
    half = send_half(producer, "real topic and queue")
    properties = producer.client.view_by_id(half.message_id).properties
    assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == (TOPIC, "1")


def test_the_half_has_no_transaction_type(producer: Producer) -> None:
    half = send_half(producer, "no transaction type")
    assert producer.client.view_by_id(half.message_id).sys_flag & TRANSACTION_TYPE_BITS == 0


def test_every_half_is_in_queue_0_of_the_half_topic(producer: Producer) -> None:
    halves = [send_half(producer, "queue 0, first"), send_half(producer, "queue 0, second")]
    records = [producer.client.view_by_id(half.message_id) for half in halves]
    assert [(record.topic, record.queue_id) for record in records] == [(HALF_TOPIC, 0)] * 2
    assert records[0].queue_offset < records[1].queue_offset


def test_the_half_has_body_and_properties_of_the_send(producer: Producer) -> None:
    half = send_half(producer, "like any message", TAGS="red", KEYS="order-1", colour="größer")
    record = producer.client.view_by_id(half.message_id)
    assert record.body == b"like any message"
    sent_properties = {"TAGS": "red", "KEYS": "order-1", "colour": "größer", "PGROUP": GROUP}
    assert sent_properties.items() <= record.properties.items()


def test_the_response_has_the_requested_queue_and_the_offset_in_the_half_queue(
    producer: Producer,
) -> None:
    half = send_half(producer, "the response")
    record = producer.client.view_by_id(half.message_id)
    assert half.queue_id == 1
    assert (half.queue_offset, half.log_offset) == (record.queue_offset, record.log_offset)
    assert half.transaction_id == unique_key("the response")


def test_a_delayed_message_has_its_topic_and_queue_as_properties_too(producer: Producer) -> None:
    result = producer.client.send(TOPIC, b"delayed", {"DELAY": "1"}, queue_id=1)
    record = producer.client.view_by_id(result.message_id)
    assert record.topic == SCHEDULE_TOPIC
    assert (record.properties["REAL_TOPIC"], record.properties["REAL_QID"]) == (TOPIC, "1")
