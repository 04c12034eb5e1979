"""A transaction whose end is in progress accepts no more messages and no second verdict."""

from __future__ import annotations

import asyncio

import pytest

from escrowmq import Message, Producer, Verdict
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.errors import TransactionConflict
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import EndTransaction
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_success
from tests.support.fake_cluster import SENDS, FakeCluster

END = RequestCode.END_TRANSACTION


class FirstEndUnanswered:
    """A responder that ignores the first end, and sets an event when it arrives."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    def __call__(self, request: Request[EndTransaction]) -> bytes | None:
        if self.arrived.is_set():
            return encode_success(request)
        self.arrived.set()
        return None


async def test_a_send_is_refused_while_the_end_is_in_progress() -> None:
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        responder = cluster["a"].responders[END] = FirstEndUnanswered()
        async with producer.transaction(Message("t", b"1")) as transaction:
            ending = asyncio.create_task(transaction.end(Verdict.ROLLBACK))
            await responder.arrived.wait()
            with pytest.raises(TransactionConflict, match="has ended") as refusal:
                await transaction.send(Message("t", b"2"))
            assert refusal.value.state == "rolled_back"
            await cancel(ending)
        assert len(cluster["a"].received(*SENDS)) == 1


async def test_an_end_that_was_cancelled_is_not_followed_by_another_verdict() -> None:
    async with FakeCluster("a") as cluster, Producer(cluster.address, group="g") as producer:
        responder = cluster["a"].responders[END] = FirstEndUnanswered()
        async with producer.transaction(Message("t", b"1")) as transaction:
            ending = asyncio.create_task(transaction.end(Verdict.ROLLBACK))
            await responder.arrived.wait()
            await cancel(ending)
        ends = [request.head.fields.commit_or_rollback for request in cluster["a"].received(END)]
        assert ends == [Verdict.ROLLBACK.value]
        assert transaction.outcome is not None
        assert transaction.outcome.verdict is Verdict.ROLLBACK
        assert not transaction.outcome.acknowledged


async def cancel(task: asyncio.Task[TransactionOutcome]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
