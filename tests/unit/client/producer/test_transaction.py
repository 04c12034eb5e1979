"""End requests to brokers that lose responses, refuse or stop; and transaction listeners."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from escrowmq import (
    Message,
    Producer,
    ReceivedMessage,
    Rollback,
    SendStatus,
    TransactionListener,
    TransactionProducer,
    Verdict,
)
from escrowmq.errors import HalfNotDurable, LocalProtocolError, RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_success
from tests.support.fake_cluster import SENDS, FakeCluster, no_response, refuse_with
from tests.support.waiting import wait_until_async

END, END_MANY = RequestCode.END_TRANSACTION, RequestCode.END_TRANSACTIONS
SEND = RequestCode.SEND_MESSAGE_V2
SHORT_TIMEOUT_S = 0.3


def verdicts(cluster: FakeCluster, name: str = "a") -> list[int]:
    return [request.head.fields.commit_or_rollback for request in cluster[name].received(END)]


async def test_a_rocketmq_broker_gets_one_end_for_each_half() -> None:
    async with FakeCluster("a", "b") as cluster, Producer(cluster.address, group="g") as producer:
        async with producer.transaction(Message("t", b"1")) as tx:
            for number in range(3):
                await tx.send(Message("t", b"%d" % number))
        assert tx.outcome is not None
        assert (tx.outcome.acknowledged, tx.outcome.oneway) == (True, False)
        assert sorted(verdicts(cluster, "a") + verdicts(cluster, "b")) == [8] * 4
        assert not cluster["a"].received(END_MANY)


async def test_a_commit_without_a_response_is_not_repeated_on_rocketmq() -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[END] = no_response
        async with (
            Producer(cluster.address, group="g", timeout_s=SHORT_TIMEOUT_S) as producer,
            producer.transaction(Message("t", b"x")) as tx,
        ):
            pass
        assert tx.outcome is not None
        assert tx.outcome.state == "committed"
        assert not tx.outcome.acknowledged
        assert "did not respond" in tx.outcome.detail
        assert verdicts(cluster) == [8]


async def test_a_rollback_without_a_response_is_repeated() -> None:
    async with FakeCluster("a") as cluster:
        responses = iter([no_response, encode_success])
        cluster["a"].responders[END] = lambda request: next(responses)(request)
        async with (
            Producer(cluster.address, group="g", timeout_s=SHORT_TIMEOUT_S) as producer,
            producer.transaction(Message("t", b"x")) as tx,
        ):
            raise Rollback
        assert tx.outcome is not None
        assert tx.outcome.acknowledged
        assert verdicts(cluster) == [12, 12]


async def test_acknowledged_ends_are_not_repeated_when_a_later_one_is_busy() -> None:
    async with FakeCluster("a") as cluster:
        responses = iter([encode_success, refuse_with(ResponseCode.SYSTEM_BUSY), encode_success])
        cluster["a"].responders[END] = lambda request: next(responses)(request)
        async with (
            Producer(cluster.address, group="g") as producer,
            producer.transaction(Message("t", b"1")) as tx,
        ):
            await tx.send(Message("t", b"2"))
        assert tx.outcome is not None
        assert tx.outcome.acknowledged
        log_offsets = [
            request.head.fields.commit_log_offset for request in cluster["a"].received(END)
        ]
        assert len(log_offsets) == 3
        assert len(set(log_offsets)) == 2


async def test_an_escrowmq_broker_gets_one_end_for_all_halves_and_it_is_repeated() -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[RequestCode.QUERY_WRITER] = encode_success
        responses = iter([no_response, encode_success])
        cluster["a"].responders[END_MANY] = lambda request: next(responses)(request)
        async with (
            Producer(cluster.address, group="g", timeout_s=SHORT_TIMEOUT_S) as producer,
            producer.transaction(Message("t", b"1")) as tx,
        ):
            await tx.send(Message("t", b"2"))
        assert tx.outcome is not None
        assert tx.outcome.acknowledged
        assert len(cluster["a"].received(END_MANY)) == 2
        assert not cluster["a"].received(END)


async def test_a_broker_that_refuses_many_ends_at_once_gets_them_one_by_one() -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[RequestCode.QUERY_WRITER] = encode_success  # it looks like EscrowMQ
        async with (
            Producer(cluster.address, group="g") as producer,
            producer.transaction(Message("t", b"1")) as tx,
        ):
            await tx.send(Message("t", b"2"))
        assert tx.outcome is not None
        assert tx.outcome.acknowledged
        assert verdicts(cluster) == [8, 8]


async def test_a_refused_end_is_raised_and_the_other_broker_still_gets_the_verdict() -> None:
    async with FakeCluster("a", "b") as cluster:
        cluster["a"].responders[END] = refuse_with(ResponseCode.SYSTEM_ERROR, "no such half")
        async with Producer(cluster.address, group="g") as producer:
            queues = await producer.queues("t")
            with pytest.raises(RequestRefused, match="no such half"):  # noqa: PT012
                async with producer.transaction() as tx:
                    for broker in "ab":
                        half = await producer.send(
                            Message("t", b"x"),
                            queue=next(queue for queue in queues if queue.broker == broker),
                        )
                        tx.halves.append(half)
        assert tx.outcome is not None
        assert not tx.outcome.acknowledged
        assert verdicts(cluster, "b") == [8]


@pytest.mark.parametrize("code", [10, 11, 12])
async def test_a_half_that_is_not_durable_is_rolled_back_before_the_block(code: int) -> None:
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = lambda request: cluster["a"].store_response(request, code)
        async with Producer(cluster.address, group="g") as producer:
            with pytest.raises(HalfNotDurable):
                async with producer.transaction(Message("t", b"x")):
                    pytest.fail("the local work must not be done")
        assert verdicts(cluster) == [12]


async def test_the_delay_of_a_half_is_sent_only_to_escrowmq() -> None:
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        async with producer.transaction(Message("t", b"x", delay_level=3)):
            pass
        await producer.send(Message("t", b"x", delay_level=3))
        half, ordinary = cluster["a"].received(*SENDS)
        assert "DELAY" not in half.head.fields.properties
        assert "DELAY\x013" in ordinary.head.fields.properties
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[RequestCode.QUERY_WRITER] = encode_success
        async with (
            Producer(cluster.address, group="g") as producer,
            producer.transaction(Message("t", b"x", delay_s=2)),
        ):
            pass
        assert "TIMER_DELAY_MS\x012000" in cluster["a"].received(*SENDS)[0].head.fields.properties


# --- listeners -----------------------------------------------------------------------------------


class FixedListener(TransactionListener):
    """A listener that returns or raises a fixed result, and records its calls."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.executed: list[tuple[Message, Any]] = []

    def execute_local_transaction(self, message: Message, arg: Any) -> Any:
        self.executed.append((message, arg))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        return Verdict.UNKNOWN


class AsyncFixedListener(FixedListener):
    """The same with a coroutine."""

    async def execute_local_transaction(self, message: Message, arg: Any) -> Any:
        return super().execute_local_transaction(message, arg)


@pytest.mark.parametrize("listener_type", [FixedListener, AsyncFixedListener])
@pytest.mark.parametrize(
    ("returned", "state", "sent_verdict"),
    [
        (Verdict.COMMIT, Verdict.COMMIT, 8),
        (Verdict.ROLLBACK, Verdict.ROLLBACK, 12),
        (Verdict.UNKNOWN, Verdict.UNKNOWN, 0),
        (None, Verdict.UNKNOWN, 0),
        (OSError("disk on fire"), Verdict.UNKNOWN, 0),
        (Rollback(), Verdict.ROLLBACK, 12),
        ("COMMIT", Verdict.UNKNOWN, 0),
    ],
    ids=str,
)
async def test_the_verdict_of_the_listener_is_sent(
    listener_type: type[FixedListener], returned: Any, state: Verdict, sent_verdict: int
) -> None:
    listener = listener_type(returned)
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(cluster.address, group="g", listener=listener) as producer,
    ):
        result = await producer.send_in_transaction(Message("t", b"x"), arg=7)
        # The end is one-way if the verdict is UNKNOWN, so it may arrive later.
        await wait_until_async(lambda: cluster["a"].received(END))
    [(message, arg)] = listener.executed
    assert arg == 7
    assert message.transaction_id == result.transaction_id == result.message_id
    assert message.properties["__transactionId__"] == result.transaction_id
    assert (result.status, result.local_state) == (SendStatus.SEND_OK, state)
    assert (result.queue.topic, result.queue_offset) == ("t", 1)
    [end] = cluster["a"].received(END)
    assert end.head.fields.commit_or_rollback == sent_verdict
    assert end.head.is_oneway == (sent_verdict == 0) == result.outcome.oneway
    assert result.outcome.acknowledged == (sent_verdict != 0)
    if isinstance(returned, OSError):
        assert "disk on fire" in end.head.remark
        assert result.error is returned
    elif returned == "COMMIT":
        assert "COMMIT" in end.head.remark


@pytest.mark.parametrize("code", [10, 11, 12])
async def test_a_status_other_than_ok_rolls_back_without_the_local_transaction(code: int) -> None:
    listener = FixedListener(Verdict.COMMIT)
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = lambda request: cluster["a"].store_response(request, code)
        async with TransactionProducer(cluster.address, group="g", listener=listener) as producer:
            result = await producer.send_in_transaction(Message("t", b"x"))
    assert not listener.executed
    assert (result.status.value, result.local_state) == (code, Verdict.ROLLBACK)
    assert verdicts(cluster) == [12]


@pytest.mark.parametrize(
    ("returned", "name"),
    [
        (Verdict.COMMIT, None),
        (Verdict.ROLLBACK, "ROLLBACK"),
        (Rollback(), "ROLLBACK"),
        (None, "UNKNOWN"),
    ],
    ids=str,
)
async def test_a_local_transaction_that_does_not_commit_is_logged_with_its_message(
    returned: Any, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "escrowmq.client.producer.transaction_producer")
    listener = FixedListener(returned)
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(cluster.address, group="g", listener=listener) as producer,
    ):
        result = await producer.send_in_transaction(Message("t", b"x"))
    lines = [record.getMessage() for record in caplog.records]
    expected = f"local transaction returned {name} id={result.message_id} topic=t"
    assert lines == ([] if name is None else [expected])


async def test_an_empty_body_is_refused_before_the_local_transaction() -> None:
    listener = FixedListener(Verdict.COMMIT)
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(cluster.address, group="g", listener=listener) as producer,
    ):
        with pytest.raises(LocalProtocolError, match="is empty"):
            await producer.send_in_transaction(Message("t", b""))
    assert not listener.executed
    assert not cluster["a"].received(*SENDS)


async def test_a_half_that_cannot_be_sent_raises_without_the_local_transaction() -> None:
    listener = FixedListener(Verdict.COMMIT)
    async with FakeCluster("a") as cluster:
        cluster["a"].responders[SEND] = refuse_with(ResponseCode.MESSAGE_ILLEGAL)
        async with TransactionProducer(cluster.address, group="g", listener=listener) as producer:
            with pytest.raises(RequestRefused):
                await producer.send_in_transaction(Message("t", b"x"))
    assert not listener.executed
    assert not cluster["a"].received(END)


async def test_a_listener_without_its_methods_is_refused() -> None:
    with pytest.raises(TypeError, match="execute_local_transaction"):
        TransactionProducer("127.0.0.1:1", group="g", listener=None)  # type: ignore[arg-type]


async def test_names_have_their_namespace_on_the_wire_and_not_for_the_user() -> None:
    listener = FixedListener(Verdict.COMMIT)
    async with (
        FakeCluster("a") as cluster,
        TransactionProducer(
            cluster.address, group="g", listener=listener, namespace="ns"
        ) as producer,
    ):
        result = await producer.send_in_transaction(Message("t", b"x"))
        assert result.queue.topic == "t"
        [batched] = await producer.send_batch([Message("t", b"x")])
        assert batched.queue.topic == "t"
        assert {queue.topic for queue in await producer.queues("t")} == {"t"}
    sends: list[Request[Any]] = cluster["a"].received(*SENDS)
    assert {request.head.fields.topic for request in sends} == {"ns%t"}
    assert {request.head.fields.producer_group for request in sends} == {"ns%g"}
    assert "PGROUP\x01ns%g\x02" in sends[0].head.fields.properties
    assert "INSTANCE_ID\x01ns\x02" in sends[0].head.fields.properties
    [end] = cluster["a"].received(END)
    assert (end.head.fields.topic, end.head.fields.producer_group) == ("ns%t", "ns%g")
