"""The end of a transaction: the final message, the op, and what is refused.

62 END_TRANSACTION, code 37, ends a transaction.
   test_the_final_has_the_topic_and_the_queue_of_the_send
63 A slave refuses ends. Here there are no slaves.
   unit/test_config.py test_an_invalid_value_is_refused_with_what_is_allowed
64 `fromTransactionCheck` tells the answer to a check from an end.
   unit/broker/transactions/test_admin.py test_a_history_has_every_check_and_its_answer
65 A commit in answer to a check is logged. Here the history of the transaction has it.
   unit/broker/transactions/test_admin.py test_a_history_has_every_check_and_its_answer
66 A rollback in answer to a check likewise.
   unit/broker/transactions/test_admin.py test_a_history_has_every_check_and_its_answer
67 Both are logged with their remark.
   unit/broker/transactions/test_remarks.py
   test_the_remark_of_a_rollback_is_in_its_op_and_in_the_log
68 UNKNOW in answer to a check leaves the half open.
   test_unknown_leaves_the_half_open_and_writes_no_op
69 It is logged with its remark.
   unit/broker/transactions/test_remarks.py test_an_unknown_answer_to_a_check_has_its_remark
70 UNKNOW after the send is logged.
   unit/broker/transactions/test_remarks.py
   test_an_unknown_after_the_send_is_in_the_history_and_in_the_log
71 A rollback after the send is logged with its remark.
   unit/broker/transactions/test_remarks.py
   test_the_remark_of_a_rollback_is_in_its_op_and_in_the_log
72 Any other verdict gets no response. Here it gets an error.
   unit/broker/transactions/test_rocketmq_weak_points.py
   test_w11_an_end_gets_a_response_with_the_outcome
73 The half is found by `commitLogOffset`.
   test_an_end_that_does_not_match_its_half_is_refused
74 The producer group must be that of the half.
   test_an_end_that_does_not_match_its_half_is_refused
75 `tranStateTableOffset` must be its queue offset.
   test_an_end_that_does_not_match_its_half_is_refused
76 `commitLogOffset` must be its log offset.
   test_an_end_that_does_not_match_its_half_is_refused
77 An end of no half is refused.
   test_an_end_that_does_not_match_its_half_is_refused
78 The final has the topic and the queue of the send.
   test_the_final_has_the_topic_and_the_queue_of_the_send
79 Its sysFlag has the transaction type commit.
   test_the_final_is_marked_as_committed
80 Its queue offset is its place in its queue.
   test_the_final_is_the_next_message_of_its_queue
81 Its prepared offset is the log offset of the half.
   test_the_final_names_its_half
82 It is stored at the time of the commit.
   test_the_final_is_stored_at_the_time_of_the_commit
83 TRAN_MSG is removed. RocketMQ 4.9.7 still delivers it.
   unit/broker/transactions/test_rocketmq_weak_points.py
   test_w19_flag_and_properties_are_those_of_the_send
84 It is stored like any message.
   test_the_final_is_found_by_its_key
85 Then the half is deleted. Here final and op are one append.
   unit/broker/transactions/test_rocketmq_weak_points.py
   test_w03_a_crash_between_final_and_op_delivers_once
86 A rollback stores no final, only the op.
   test_a_rollback_stores_the_op_and_no_final
87 The response has a code and a remark. Here it has also the outcome.
   unit/broker/transactions/test_rocketmq_weak_points.py
   test_w11_an_end_gets_a_response_with_the_outcome
88 A second end is carried out again. Here the first decision stands.
   unit/broker/transactions/test_rocketmq_weak_points.py test_w02_the_first_decision_stands
89 A half is "deleted" by a message in RMQ_SYS_TRANS_OP_HALF_TOPIC.
   test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half
90 Its tag is `d`.
   test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half
91 Its body is the queue offset of the half as text.
   test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half
92 The op queue has the number of the half queue.
   test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half
93 If the op cannot be stored, a delivered half stays open. Here that cannot happen.
   unit/broker/transactions/test_end.py test_an_end_without_disk_space_changes_nothing
94 UNKNOW writes no op.
   test_unknown_leaves_the_half_open_and_writes_no_op
95 An end is one-way. Our client sends COMMIT and ROLLBACK as requests.
   test_an_end_may_be_one_way
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.interop.producers import GROUP, TOPIC, Producer, unique_key
from tests.interop.records import Record
from tests.interop.remoting import COMMIT, OP_TOPIC, ROLLBACK, UNKNOWN
from tests.support.escrows import EscrowBench
from tests.support.raw_transactions import (
    END_TRANSACTION,
    end_fields,
    records_after,
    send_half,
    wait_until_delivered,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SYSTEM_ERROR = 1
TRANSACTION_TYPE_BITS = 12


class Ended(NamedTuple):
    half: Record
    final: Record


def commit(producer: Producer, name: str, **properties: str) -> Ended:
    """Send a half to queue 1, commit it, and return both records."""
    half = send_half(producer, name, **properties)
    producer.end(half, COMMIT)
    final = wait_until_delivered(producer, name)
    return Ended(producer.client.view_by_id(half.message_id), final)


# --- the final -----------------------------------------------------------------------------------


def test_the_final_has_the_topic_and_the_queue_of_the_send(producer: Producer) -> None:
    final = commit(producer, "topic and queue of the send").final
    assert (final.topic, final.queue_id) == (TOPIC, 1)


def test_the_final_is_marked_as_committed(producer: Producer) -> None:
    final = commit(producer, "marked as committed").final
    assert final.sys_flag & TRANSACTION_TYPE_BITS == COMMIT


def test_the_final_is_the_next_message_of_its_queue(producer: Producer) -> None:
    end = producer.client.max_offset(TOPIC, 1)
    assert commit(producer, "next of its queue").final.queue_offset == end


def test_the_final_names_its_half(producer: Producer) -> None:
    ended = commit(producer, "names its half")
    assert ended.final.prepared_log_offset == ended.half.log_offset


def test_the_final_is_stored_at_the_time_of_the_commit() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.now_ms += 1_600
    bench.end(position, COMMIT)
    [final] = bench.messages()
    assert final.stored_ms == bench.now_ms


def test_the_final_is_found_by_its_key(producer: Producer) -> None:
    final = commit(producer, "found by its key", KEYS="order-found-by-key").final
    client = producer.client
    wait_until(
        lambda: (
            [record.body for record in client.query_by_key(TOPIC, "order-found-by-key")]
            == [final.body]
        ),
        "the final is not in the index",
    )


# --- the op --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half(
    producer: Producer, verdict: int
) -> None:
    half = send_half(producer, f"op after {verdict}")
    producer.end(half, verdict)
    record = producer.client.view_by_id(half.message_id)
    ops = [  # the shared broker may store the op of another half now
        (later.queue_id, later.properties["TAGS"])
        for later in records_after(producer.client, record)
        if later.topic == OP_TOPIC and later.body == b"%d" % half.queue_offset
    ]
    assert ops == [(0, "d")]


def test_a_rollback_stores_the_op_and_no_final(producer: Producer) -> None:
    half = send_half(producer, "op and no final")
    producer.end(half, ROLLBACK)
    record = producer.client.view_by_id(half.message_id)
    later_records = list(records_after(producer.client, record))
    assert b"%d" % half.queue_offset in {record.body for record in later_records}
    assert half.log_offset not in {record.prepared_log_offset for record in later_records}


@pytest.mark.parametrize("is_check", [False, True])
def test_unknown_leaves_the_half_open_and_writes_no_op(is_check: bool) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.end(position, UNKNOWN, check=is_check)
    assert bench.state_in_memory(position) == "open"
    assert bench.messages(OP_TOPIC) == []


# --- refused and one-way ends --------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", ["producerGroup", "tranStateTableOffset", "commitLogOffset", "no half"]
)
def test_an_end_that_does_not_match_its_half_is_refused(producer: Producer, wrong: str) -> None:
    half, other = send_half(producer, f"wrong {wrong}"), send_half(producer, f"not {wrong}")
    end_of_log = other.log_offset + (1 << 20)
    values: dict[str, dict[str, object]] = {
        "producerGroup": {"producerGroup": "another group"},
        "tranStateTableOffset": {"tranStateTableOffset": other.queue_offset},
        "commitLogOffset": {"commitLogOffset": other.log_offset},
        "no half": {"commitLogOffset": end_of_log, "tranStateTableOffset": 1 << 20},
    }
    fields = {**end_fields(half, COMMIT), **values[wrong]}
    assert producer.client.request(END_TRANSACTION, fields).code == SYSTEM_ERROR
    for each in (half, other):
        producer.end(each, COMMIT)
    wait_until_delivered(producer, f"not {wrong}")
    assert producer.delivered()[f"wrong {wrong}"] == 1


def test_an_end_may_be_one_way(producer: Producer) -> None:
    half = send_half(producer, "ended one-way")
    producer.client.send_one_way(END_TRANSACTION, end_fields(half, COMMIT))
    final = wait_until_delivered(producer, "ended one-way")
    assert final.properties["UNIQ_KEY"] == unique_key("ended one-way")
    assert final.properties["PGROUP"] == GROUP
