"""The producer with a real broker, also one that is killed and restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from escrowmq import Message, Producer, ReceivedMessage, Rollback, SendStatus, Verdict
from escrowmq.errors import (
    EscrowError,
    NoRoute,
    RequestRefused,
    TransactionConflict,
    TransportError,
)
from tests.support.brokers import LocalServer
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

CONF = {"transactionTimeOut": 1000, "transactionCheckInterval": 500}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer(CONF) as server:
        yield server


def bodies(server: LocalServer, topic: str) -> list[bytes]:
    with server.client() as reader:
        return [record.body for queue in range(4) for record in reader.pull_all(topic, queue)]


async def test_a_message_is_received_as_it_was_sent(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        result = await producer.send(
            Message("audit", b"hello", keys=["k1", "k2"], tags="created", properties={"a": "b"})
        )
    assert result.status is SendStatus.SEND_OK
    with server.client() as reader:
        [record] = reader.pull_all("audit", result.queue.queue_id)
    assert record.body == b"hello"
    assert record.properties["KEYS"] == "k1 k2"
    assert (record.properties["TAGS"], record.properties["a"]) == ("created", "b")
    assert record.properties["UNIQ_KEY"] == result.message_id


async def test_messages_with_one_sharding_key_go_to_one_queue(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        results = [
            await producer.send(Message("sharded", b"%d" % n, sharding_key="customer-7"))
            for n in range(8)
        ]
    assert len({result.queue.queue_id for result in results}) == 1
    assert bodies(server, "sharded") == [b"%d" % n for n in range(8)]


async def test_leaving_the_block_commits_all_messages(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        async with producer.transaction(Message("orders", b"o-1")) as tx:
            await tx.send(Message("stock", b"o-1"))
            assert bodies(server, "orders") == bodies(server, "stock") == []
        assert tx.outcome is not None
        assert (tx.outcome.state, tx.outcome.acknowledged) == ("committed", True)
    assert bodies(server, "orders") == bodies(server, "stock") == [b"o-1"]


async def test_rollback_is_not_raised_outside_the_block(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        async with producer.transaction(Message("rolled", b"no")) as tx:
            raise Rollback
        assert tx.outcome is not None
        assert tx.outcome.state == "rolled_back"
        with pytest.raises(TransactionConflict):
            await tx.send(Message("rolled", b"too late"))
    assert bodies(server, "rolled") == []


@pytest.mark.parametrize("kind", ["coroutine", "function"])
async def test_after_any_other_exception_the_checker_decides(
    server: LocalServer, kind: str
) -> None:
    topic = f"checked-{kind}"
    checked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> Verdict | None:
        """Fail in the first check, return no verdict in the second, and commit in the third."""
        checked.append(message)
        if len(checked) == 1:
            raise ValueError("planted")
        return None if len(checked) == 2 else Verdict.COMMIT

    async def check_async(message: ReceivedMessage) -> Verdict | None:
        return check(message)

    async with Producer(server.namesrv_address, group=f"g-{kind}") as producer:
        producer.checker(topic)(check_async if kind == "coroutine" else check)
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(Message(topic, b"maybe", keys="k")) as tx:
                raise ZeroDivisionError
        assert tx.outcome is not None
        assert tx.outcome.state == "open"
        await wait_until_async(lambda: bodies(server, topic) == [b"maybe"])
    assert {message.transaction_id for message in checked} == {tx.id}
    assert {(message.topic, message.body, message.keys) for message in checked} == {
        (topic, b"maybe", "k")
    }


async def test_on_error_is_the_verdict_after_an_exception(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(
                Message("certain", b"x"), on_error=Verdict.ROLLBACK
            ) as tx:
                raise ZeroDivisionError
        assert tx.outcome is not None
        assert (tx.outcome.state, tx.outcome.acknowledged) == ("rolled_back", True)


async def test_a_transaction_decided_otherwise_raises_transaction_conflict(
    server: LocalServer,
) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        with pytest.raises(TransactionConflict):  # noqa: PT012
            async with producer.transaction(Message("contradicted", b"x")) as tx:
                [half] = tx.halves
                # Private: an END that the public API would never send.
                fields = producer._ender.end_header(half, Verdict.ROLLBACK)
                # Private: the request goes past the public API.
                connection = await producer._connect(half.queue, False)
                await connection.call_checked(37, fields, timeout_s=3)
    assert bodies(server, "contradicted") == []


async def test_errors_tell_whether_to_retry(server: LocalServer) -> None:
    async with Producer(server.namesrv_address, group="p", retries=0) as producer:
        with pytest.raises(RequestRefused) as refused:
            await producer.send(Message("audit", b"x", properties={"long": "x" * 40_000}))
        assert not refused.value.may_have_happened
    async with Producer("127.0.0.1:1", group="p") as producer:
        with pytest.raises(TransportError) as failed:
            await producer.send(Message("audit", b"x"))
        assert failed.value.retriable
        assert not isinstance(failed.value, NoRoute)


async def test_a_restarted_broker_is_used_again() -> None:
    with LocalServer({**CONF, "flushDiskType": "SYNC_FLUSH"}, in_process=False) as server:
        async with Producer(server.namesrv_address, group="p", timeout_s=2) as producer:
            await producer.send(Message("survivor", b"before"))
            await asyncio.to_thread(server.kill)
            with pytest.raises(EscrowError):
                await producer.send(Message("survivor", b"broker is down"))
            await asyncio.to_thread(server.start)
            await producer.send(Message("survivor", b"after"))
            async with producer.transaction(Message("survivor", b"in a transaction")):
                pass
        assert sorted(bodies(server, "survivor")) == [b"after", b"before", b"in a transaction"]
