"""The consumer, and the older flow of RocketMQ 3.

142 Committed messages are consumed like ordinary ones.
    test_committed_messages_are_consumed_like_ordinary_ones
143 If consumption fails after the commit, that is left to the business. Here it is tried again.
    e2e/client/test_consumer.py test_a_message_sent_back_too_often_moves_to_the_dead_letters
144 In the older flow a prepared record has no queue entry. Such records are still read so.
    unit/message/test_tags_and_keys.py
    test_the_transaction_bits_decide_about_queue_entry_and_keys
145 There an end appends a second record. Since RocketMQ 4.3 there are half, final and op.
    articles/test_end.py test_a_rollback_stores_the_op_and_no_final
146 There everything but a commit is a rollback. Today an exception is UNKNOW.
    unit/client/producer/test_transaction.py test_the_verdict_of_the_listener_is_sent
"""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq import (
    Consumer,
    Message,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
)
from tests.interop.apache import wait_for_route
from tests.interop.remoting import Client
from tests.support.clients import Broker, receive

pytestmark = pytest.mark.slow


class PassedVerdicts(TransactionListener):
    """A listener whose verdict is the argument of the send."""

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict:
        verdict: Verdict = arg
        return verdict

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        return Verdict.UNKNOWN


async def test_committed_messages_are_consumed_like_ordinary_ones(broker: Broker) -> None:
    with Client(broker.address) as client:
        client.create_topic("consumed", queues=1)
    wait_for_route(broker.namesrv_address, "consumed", broker.address)
    async with TransactionProducer(
        broker.namesrv_address, group="consumed-producers", listener=PassedVerdicts()
    ) as producer:
        await producer.send(Message("consumed", b"ordinary"))
        for body, verdict in (
            (b"rolled back", Verdict.ROLLBACK),
            (b"open", Verdict.UNKNOWN),
            (b"committed", Verdict.COMMIT),
        ):
            await producer.send_in_transaction(Message("consumed", body), verdict)
        await producer.send(Message("consumed", b"ordinary again"))
    async with Consumer(
        broker.namesrv_address, group="consumed-consumers", subscribe={"consumed": "*"}
    ) as consumer:
        bodies = await receive(consumer, 3)
    assert bodies == [b"ordinary", b"committed", b"ordinary again"]
