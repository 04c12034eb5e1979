"""The check service: when the broker asks, whom it asks, and when it stops asking.

 96 TransactionalMessageCheckService works from the start of the broker.
    test_a_check_is_a_one_way_request_with_the_offsets_and_the_message
 97 `transactionCheckMax` is 15.
    test_the_defaults_are_15_checks_after_6_seconds_every_30_seconds
 98 `transactionCheckInterval` is 60 s in RocketMQ 4, 30 s in RocketMQ 5 and here.
    test_the_defaults_are_15_checks_after_6_seconds_every_30_seconds
 99 `transactionTimeOut` is 6 s: no check before.
    test_the_defaults_are_15_checks_after_6_seconds_every_30_seconds
100 The interval is that of a round over all halves. Here each half has its own time.
    unit/broker/transactions/test_rocketmq_weak_points.py test_w24_a_check_is_sent_when_it_is_due
101 Each round is logged. Here metrics count the checks.
    e2e/broker/test_metrics.py
    test_the_page_has_the_declared_metrics_with_their_kinds_and_labels
102 Every queue of the half topic has its op queue. There is one of each.
    articles/test_end.py test_the_op_is_a_message_with_tag_d_and_the_offset_of_the_half
103 The offsets of two consumers are the cursors. Here a table counts, the cursors are maintained.
    unit/escrow/test_cursors.py test_reading_from_the_cursors_finds_exactly_the_open_halves
104 An invalid cursor skips the queue. Here only the cursors of a RocketMQ broker are read.
    unit/escrow/test_recovery.py test_halves_before_the_cursor_of_rocketmq_are_open_without_a_proof
105 fillOpRemoveMap reads 32 ops at a time. Here all ops are read once, at the start.
    unit/escrow/test_recovery.py test_halves_and_ops_of_rocketmq_are_read
106 An op cursor that is not valid any more moves on.
    unit/escrow/test_recovery_unreadable.py
    test_the_op_cursor_passes_an_op_that_names_no_half_at_the_end_of_its_queue
107 The op cursor passes the ops of halves before the half cursor.
    unit/escrow/test_cursors.py test_cursors_are_at_the_first_open_half_and_its_first_op
108 A half with an op is not checked.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w04_a_half_decided_just_before_a_stop_is_not_checked
109 An op without the tag `d` decides nothing.
    unit/escrow/test_recovery_unreadable.py test_an_op_that_names_no_half_decides_nothing
110 A round has a limit of time. Here a tick sends a limited number of checks.
    test_a_tick_sends_a_limited_number_of_checks
111 A half that cannot be read is passed. Here it is reported.
    unit/broker/transactions/test_unreadable_halves.py test_recovery_reports_unreadable_halves
112 needDiscard: a half that was checked as often as the maximum is not checked again.
    test_a_half_is_checked_up_to_the_maximum_and_then_set_aside
113 needSkip: a half older than 72 hours is not checked again.
    unit/escrow/test_next_step.py test_next_step
114 resolveDiscardMsg: a copy goes to TRANS_CHECK_MAX_TIME_TOPIC.
    test_a_half_is_checked_up_to_the_maximum_and_then_set_aside
115 A discarded half is forgotten. Here it is listed and can be resumed.
    unit/broker/transactions/test_admin.py test_a_resumed_transaction_is_checked_again
116 Any half can be discarded, whatever its size.
    unit/broker/transactions/test_half_limits.py
    test_an_accepted_half_survives_everything_until_its_commit
117 A half that is stored during a round has to wait.
    unit/escrow/test_check_schedule.py test_every_half_is_taken_once_and_not_before_its_time
118 CHECK_IMMUNITY_TIME_IN_SECONDS of a message replaces the timeout.
    test_the_immunity_time_of_a_message_replaces_the_timeout
119 An immunity time of 0 means a check at once.
    unit/escrow/test_records.py test_an_immunity_time_of_zero_means_a_check_at_once
120 The age of a half is counted by the producer's clock. Here by that of the broker.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w07_the_producers_clock_decides_nothing
121 A half within its immunity time is appended again. Here it stays.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w06_a_long_immunity_uses_up_no_checks
122 A young half ends the round for those behind it. Here it does not.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w23_an_unanswered_half_does_not_delay_others
123 isNeedCheck looks at ops, times and clock. Here a half is due or not.
    unit/escrow/test_next_step.py test_next_step
124 If a check is not needed, more ops are read. Here nothing is read.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w22_halves_that_are_not_due_cost_nothing
125 putBackHalfMsgQueue appends the half again before a check. Here it stays.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w21_a_check_makes_no_copy_of_the_message
126 If that fails, it is tried again. Here a check that was not sent does not count.
    unit/broker/transactions/test_end.py test_a_check_that_was_not_sent_does_not_count
127 resolveHalfMsg does not wait for an answer.
    unit/broker/transactions/test_rocketmq_weak_points.py test_w32_a_slow_client_is_not_flooded
128 sendCheckMessage goes to a member of the producer group. Here to the sender first.
    test_another_member_of_the_group_is_asked_if_the_sender_has_left
129 CHECK_TRANSACTION_STATE is one-way and has offsets, ids and the message.
    test_a_check_is_a_one_way_request_with_the_offsets_and_the_message
130 Both cursors are saved after a round.
    unit/escrow/test_recovery.py test_cursors_are_not_ahead_of_the_log
131 An exception is logged, and the service continues.
    unit/broker/transactions/test_half_limits.py
    test_a_check_that_fails_sets_one_half_aside_and_others_are_checked
132 The log is never changed, so a copy has the number of checks. Here a journal has it.
    unit/escrow/test_recovery.py test_the_number_of_checks_survives_a_crash
"""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.config import TransactionConfig
from escrowmq.escrow.checks import CHECKS_AT_ONCE_MAX
from tests.interop.producers import CHECK_TRANSACTION_STATE, TOPIC, Producer, unique_key
from tests.interop.records import Record, decode_record
from tests.interop.remoting import COMMIT, ONE_WAY, SendResult
from tests.support.broker_requests import FakeChannel
from tests.support.clients import Broker
from tests.support.escrows import EscrowBench, sent_checks
from tests.support.raw_transactions import (
    CHECKS_MAX,
    END_TRANSACTION,
    end_fields,
    send_half,
    stranded_bodies,
    wait_until_delivered,
)

pytestmark = pytest.mark.slow


def test_the_defaults_are_15_checks_after_6_seconds_every_30_seconds() -> None:
    config = TransactionConfig()
    assert (config.checks_max, config.immunity_ms, config.check_interval_ms) == (15, 6_000, 30_000)


def test_a_tick_sends_a_limited_number_of_checks() -> None:
    bench = EscrowBench()
    channels = [FakeChannel(f"127.0.0.1:{40_000 + number}") for number in range(3)]
    for channel in channels:
        for number in range(CHECKS_AT_ONCE_MAX // 2):
            bench.park(f"{channel.address}-{number}", group=channel.address, channel=channel)
    bench.tick(bench.config.immunity_ms)
    sent_counts = [len(sent_checks(channel)) for channel in channels]
    assert sum(sent_counts) == CHECKS_AT_ONCE_MAX
    assert all(sent_counts)
    bench.tick(CHECKS_AT_ONCE_MAX)
    assert sum(len(sent_checks(channel)) for channel in channels) > 0


def test_a_half_is_checked_up_to_the_maximum_and_then_set_aside(producer: Producer) -> None:
    producer.park("never answered")
    producer.respond_until(lambda: b"never answered" in stranded_bodies(producer.client), {})
    assert producer.checks["never answered"] == CHECKS_MAX
    producer.park("checked after it")
    producer.respond_until(lambda: producer.checks["checked after it"] > 0, {})
    assert producer.checks["never answered"] == CHECKS_MAX


def test_the_immunity_time_of_a_message_replaces_the_timeout(producer: Producer) -> None:
    # Not longer: in RocketMQ each round within the immunity time counts as a check.
    send_half(producer, "immune for long", CHECK_IMMUNITY_TIME_IN_SECONDS="2")
    send_half(producer, "immune as usual")
    producer.respond_until(lambda: producer.checks["immune for long"] > 0, {})
    names = [name for name in producer.checks if name.startswith("immune")]
    assert names == ["immune as usual", "immune for long"]


def test_another_member_of_the_group_is_asked_if_the_sender_has_left(broker: Broker) -> None:
    with Producer(broker.address, "another group") as stranger:
        with Producer(broker.address) as sender:
            sender.park("left by its sender")
        with Producer(broker.address) as heir:
            heir.respond_until(
                lambda: heir.delivered()["left by its sender"] == 1, {"left by its sender": COMMIT}
            )
            assert heir.checks["left by its sender"] >= 1
        stranger.respond_to_checks({}, seconds=0.1)
        assert not stranger.checks


def test_a_check_is_a_one_way_request_with_the_offsets_and_the_message(
    producer: Producer,
) -> None:
    half = send_half(producer, "checked", TAGS="red", KEYS="order-1")
    header, record = next_check(producer, b"checked")
    assert header["flag"] & ONE_WAY
    assert (record.topic, record.queue_id, record.body) == (TOPIC, 1, b"checked")
    assert (record.properties["TAGS"], record.properties["KEYS"]) == ("red", "order-1")
    assert record.properties["TRANSACTION_CHECK_TIMES"] == "1"
    fields = header["extFields"]
    assert fields["msgId"] == fields["transactionId"] == unique_key("checked")
    # RocketMQ has appended the half again, so the offsets are those of the copy.
    position = SendResult(
        message_id=f"{int(fields['commitLogOffset']):032X}",
        queue_id=1,
        queue_offset=int(fields["tranStateTableOffset"]),
        transaction_id=fields["transactionId"],
    )
    assert position.queue_offset >= half.queue_offset
    answer = {**end_fields(position, COMMIT), "fromTransactionCheck": True}
    producer.client.send_one_way(END_TRANSACTION, answer)
    assert wait_until_delivered(producer, "checked").queue_id == 1


def next_check(producer: Producer, body: bytes) -> tuple[dict[str, Any], Record]:
    """Return the header and the message of the next check of a half with this body."""
    while True:
        header, data = producer.client.next_frame()
        if header["code"] == CHECK_TRANSACTION_STATE:
            record = decode_record(data)
            if record.body == body:
                return header, record
