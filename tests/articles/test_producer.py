"""The producer: its API, what it sends, and how it answers a check.

 11 TransactionMQProducer is a DefaultMQProducer.
    articles/test_consumer.py test_committed_messages_are_consumed_like_ordinary_ones
 12 It has a group, a namespace and a hook that signs requests.
    unit/client/producer/test_transaction.py
    test_names_have_their_namespace_on_the_wire_and_not_for_the_user
 13 TransactionListener has two methods, one to execute and one to check.
    e2e/client/test_checkers.py test_a_listener_executes_and_checks_local_transactions
 14 executeLocalTransaction runs after the half was stored.
    test_the_local_transaction_runs_between_the_half_and_the_end
 15 Its argument is passed through from the send.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 16 checkLocalTransaction gets the message as it was sent.
    test_the_checker_gets_the_message_as_it_was_sent
 17 sendMessageInTransaction sends, executes and ends.
    e2e/client/test_checkers.py test_a_listener_executes_and_checks_local_transactions
 18 Without a listener there is an error.
    unit/client/producer/test_transaction.py test_a_listener_without_its_methods_is_refused
 19 LocalTransactionExecuter and TransactionCheckListener are the deprecated form.
    No test: RocketMQ 5 has removed them, and our client never had them.
 20 The deprecated form without its check listener is an error.
    No test: RocketMQ's client checks it itself.
 21 start() creates a pool for checks if none was set.
    e2e/client/test_checkers.py test_no_more_checkers_run_than_check_concurrency_allows
 22 The pool has one thread: one check at a time.
    e2e/client/test_checkers.py
    test_a_listener_is_called_for_one_check_at_a_time_as_by_rocketmqs_client
 23 setExecutorService sets a pool of the user.
    e2e/client/test_checkers.py
    test_checkers_run_in_the_executor_of_the_user_which_stays_open
 24 checkRequestHoldMax limits the checks that wait. Here the others are answered with UNKNOWN.
    e2e/client/test_checkers.py test_checks_beyond_the_limit_are_answered_with_unknown
 25 shutdown() ends the pool.
    test_closing_the_producer_waits_for_the_answer_to_a_check
 26 setNamesrvAddr takes several addresses.
    unit/client/producer/test_sender.py test_name_servers_that_are_down_are_skipped
 27 The topic is in the namespace.
    unit/client/producer/test_transaction.py
    test_names_have_their_namespace_on_the_wire_and_not_for_the_user
 28 Transactional messages have no delay. Here it counts from the commit.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w17_a_delay_counts_from_the_commit
 29 Validators.checkMessage refuses messages without topic or body and too large ones.
    unit/client/producer/test_encoding.py
    test_a_message_that_the_java_client_refuses_is_refused
 30 The half has the property TRAN_MSG=true.
    test_the_half_is_sent_with_its_mark_its_group_and_the_prepared_flag
 31 The half has the property PGROUP with the producer group.
    test_the_half_is_sent_with_its_mark_its_group_and_the_prepared_flag
 32 The half has the transaction type prepared.
    test_the_half_is_sent_with_its_mark_its_group_and_the_prepared_flag
 33 It is sent like any message, and again if that fails.
    unit/client/producer/test_sender.py test_every_attempt_has_the_same_unique_key
 34 If the send fails, there is an error and no local transaction.
    unit/client/producer/test_transaction.py
    test_a_half_that_cannot_be_sent_raises_without_the_local_transaction
 35 After SEND_OK the local transaction runs.
    test_the_local_transaction_runs_between_the_half_and_the_end
 36 The message has the property __transactionId__.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 37 Its transaction id is the UNIQ_KEY.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 38 null from the listener is UNKNOW.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 39 A state other than COMMIT_MESSAGE is logged with the message.
    unit/client/producer/test_transaction.py
    test_a_local_transaction_that_does_not_commit_is_logged_with_its_message
 40 An exception of the listener is UNKNOW.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 41 After a send status other than SEND_OK there is a rollback and no local transaction.
    unit/client/producer/test_transaction.py
    test_a_status_other_than_ok_rolls_back_without_the_local_transaction
 42 If the end fails, the result is returned all the same. Here it says so.
    unit/client/producer/test_transaction.py
    test_a_commit_without_a_response_is_not_repeated_on_rocketmq
 43 TransactionSendResult has status, queue, ids, offset and local state.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 44 `commitLogOffset` is taken from the offset id.
    test_the_end_names_the_half_by_its_offsets_and_its_id
 45 The end goes to the broker of the queue.
    test_the_end_goes_to_the_broker_that_stored_the_half
 46 EndTransactionRequestHeader has ids, offsets, group and verdict.
    test_the_end_names_the_half_by_its_offsets_and_its_id
 47 The verdict is the transaction type commit, rollback or none.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
 48 `tranStateTableOffset` is the queue offset in the response to the half.
    test_the_end_names_the_half_by_its_offsets_and_its_id
 49 The remark of the end has the exception.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
133 A check is answered in the pool for checks.
    e2e/client/test_checkers.py test_no_more_checkers_run_than_check_concurrency_allows
134 The listener decides.
    e2e/client/test_checkers.py test_a_listener_executes_and_checks_local_transactions
135 Without a listener there is no answer. Here it is UNKNOWN.
    e2e/client/test_checkers.py test_a_check_without_a_checker_is_logged_and_counted
136 An exception of the listener is UNKNOW with a remark.
    e2e/client/test_checkers.py
    test_an_exception_or_wrong_result_of_a_checker_counts_as_unknown
137 The answer has `fromTransactionCheck` and the UNIQ_KEY as id.
    test_the_answer_to_a_check_has_the_offsets_and_the_id_of_the_check
138 Offsets and transaction id of the check come back.
    test_the_answer_to_a_check_has_the_offsets_and_the_id_of_the_check
139 Rollback and UNKNOW in answer to a check are logged as warnings.
    e2e/client/test_checkers.py
    test_a_check_answered_with_rollback_or_unknown_is_a_warning
140 The answer is one-way.
    test_the_answer_to_a_check_has_the_offsets_and_the_id_of_the_check
141 null from the checker is an exception. Here it is UNKNOWN.
    test_a_checker_that_returns_none_answers_unknown
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from escrowmq import (
    Message,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
)
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode
from escrowmq.remoting.command import Command, encode_command
from tests.interop.apache import wait_for_route
from tests.interop.remoting import PREPARED, Client
from tests.support.clients import Broker
from tests.support.fake_cluster import SENDS, FakeBroker, FakeCluster
from tests.support.stores import HOST
from tests.support.waiting import wait_until_async

END = RequestCode.END_TRANSACTION
MESSAGE = Message("t", b"x", tags="red", keys="order-1", properties={"colour": "größer"})


class RecordingListener(TransactionListener):
    """A listener with fixed verdicts that records its messages."""

    def __init__(
        self,
        executed: Verdict | None = Verdict.COMMIT,
        checked: Verdict | None = Verdict.COMMIT,
        cluster: FakeCluster | None = None,
    ) -> None:
        self.executed, self.checked, self.cluster = executed, checked, cluster
        self.checks: list[ReceivedMessage] = []
        self.requests_at_execution: list[tuple[int, int]] = []

    def execute_local_transaction(self, message: Message, arg: Any) -> Any:
        if self.cluster is not None:
            broker = self.cluster["a"]
            counts = len(broker.received(*SENDS)), len(broker.received(END))
            self.requests_at_execution.append(counts)
        return self.executed

    def check_local_transaction(self, message: ReceivedMessage) -> Any:
        self.checks.append(message)
        return self.checked


# --- sending -------------------------------------------------------------------------------------


async def test_the_half_is_sent_with_its_mark_its_group_and_the_prepared_flag() -> None:
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(cluster.address, group="g", listener=RecordingListener()) as producer,
    ):
        await producer.send_in_transaction(MESSAGE)
    [half] = cluster["a"].received(*SENDS)
    properties = decode_properties(half.head.fields.properties.encode())
    assert (properties["TRAN_MSG"], properties["PGROUP"]) == ("true", "g")
    assert half.head.fields.sys_flag == PREPARED


async def test_the_local_transaction_runs_between_the_half_and_the_end() -> None:
    async with FakeCluster("a") as cluster:
        listener = RecordingListener(cluster=cluster)
        async with TransactionProducer(cluster.address, group="g", listener=listener) as producer:
            await producer.send_in_transaction(MESSAGE)
        assert listener.requests_at_execution == [(1, 0)]
        assert len(cluster["a"].received(END)) == 1


async def test_the_end_names_the_half_by_its_offsets_and_its_id() -> None:
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(cluster.address, group="g", listener=RecordingListener()) as producer,
    ):
        await producer.send(MESSAGE)  # so that the offsets of the half are not the first ones
        result = await producer.send_in_transaction(MESSAGE)
    [end] = cluster["a"].received(END)
    fields = end.head.fields
    assert fields.producer_group == "g"
    assert (fields.tran_state_table_offset, fields.commit_log_offset) == (2, 200)
    assert fields.msg_id == fields.transaction_id == result.message_id
    assert not fields.from_transaction_check


async def test_the_end_goes_to_the_broker_that_stored_the_half() -> None:
    async with (
        FakeCluster("a", "b") as cluster,
        TransactionProducer(cluster.address, group="g", listener=RecordingListener()) as producer,
    ):
        for _ in range(8):  # each of the eight queues gets one
            await producer.send_in_transaction(MESSAGE)
    for name in ("a", "b"):
        halves, ends = cluster[name].received(*SENDS), cluster[name].received(END)
        assert len(halves) == len(ends) > 0, name


# --- checks --------------------------------------------------------------------------------------


def send_check(broker: FakeBroker) -> None:
    """Send a check of a half with the queue offset 7 and the log offset 700."""
    record = NewRecord("t", 1, b"x", b"UNIQ_KEY\x01key\x02PGROUP\x01g\x02")
    body = encode_record(record, 7, 700, 0, HOST)
    fields = {"tranStateTableOffset": "7", "commitLogOffset": "700"}
    ids = {"msgId": "key", "transactionId": "key", "offsetMsgId": "0" * 32}
    head = Command(
        code=RequestCode.CHECK_TRANSACTION_STATE,
        opaque=1,
        flag=FLAG_ONEWAY,
        ext_fields={**fields, **ids},
    )
    header = encode_command(head)
    frame = b"%s%s" % (len(header).to_bytes(4, "big"), header) + body
    broker.transports[0].write(len(frame).to_bytes(4, "big") + frame)


async def answer_to_check(listener: RecordingListener) -> Any:
    """Return the head of the request by which our client answers a check."""
    async with FakeCluster("a") as cluster:
        async with TransactionProducer(cluster.address, group="g", listener=listener) as producer:
            await producer.send(MESSAGE)
            send_check(cluster["a"])
            await wait_until_async(lambda: cluster["a"].received(END))
        [answer] = cluster["a"].received(END)
    return answer.head


async def test_the_answer_to_a_check_has_the_offsets_and_the_id_of_the_check() -> None:
    head = await answer_to_check(RecordingListener(checked=Verdict.COMMIT))
    fields = head.fields
    assert head.is_oneway
    assert fields.from_transaction_check
    assert (fields.tran_state_table_offset, fields.commit_log_offset) == (7, 700)
    assert (fields.msg_id, fields.transaction_id) == ("key", "key")
    assert (fields.producer_group, fields.commit_or_rollback) == ("g", 8)


async def test_a_checker_that_returns_none_answers_unknown() -> None:
    head = await answer_to_check(RecordingListener(checked=None))
    assert head.fields.commit_or_rollback == 0


async def test_closing_the_producer_waits_for_the_answer_to_a_check() -> None:
    may_return = threading.Event()

    class SlowListener(RecordingListener):
        def check_local_transaction(self, message: ReceivedMessage) -> Any:
            super().check_local_transaction(message)
            may_return.wait(60)
            return Verdict.ROLLBACK

    listener = SlowListener()
    async with FakeCluster("a") as cluster:
        producer = TransactionProducer(cluster.address, group="g", listener=listener)
        async with producer:
            await producer.send(MESSAGE)
            send_check(cluster["a"])
            await wait_until_async(lambda: listener.checks)
            threading.Timer(0.1, may_return.set).start()
        await wait_until_async(lambda: cluster["a"].received(END))
    [answer] = cluster["a"].received(END)
    assert answer.head.fields.commit_or_rollback == 12


@pytest.mark.slow
async def test_the_checker_gets_the_message_as_it_was_sent(broker: Broker) -> None:
    with Client(broker.address) as client:
        client.create_topic("t")
    wait_for_route(broker.namesrv_address, "t", broker.address)
    listener = RecordingListener(executed=Verdict.UNKNOWN)
    async with TransactionProducer(
        broker.namesrv_address, group="checked-as-sent", listener=listener
    ) as producer:
        result = await producer.send_in_transaction(MESSAGE)
        await wait_until_async(lambda: listener.checks)
    message = listener.checks[0]
    assert (message.topic, message.body, message.tags) == ("t", b"x", "red")
    assert message.keys == MESSAGE.keys
    assert message.properties["colour"] == "größer"
    assert message.transaction_id == result.transaction_id
