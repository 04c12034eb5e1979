"""The worked example of messages 1 to 7, the sample program, and the transfer.

147 1, 2 and 3 are committed: both cursors are at 3.
    test_the_cursors_after_messages_1_to_4
148 4 has no op: it is checked, and RocketMQ appends it again. Here it stays.
    test_the_cursors_after_messages_1_to_4
149 4 is committed: both cursors are at the ends of their queues.
    test_the_cursors_after_messages_1_to_4
150 5, 6 and 7 are sent and only 7 is committed: 5 and 6 are checked.
    test_the_cursors_after_messages_5_to_7
151 5 and 6 are decided at their new places. Here at their own.
    test_the_cursors_after_messages_5_to_7
152 The queue makes progress whether or not there are answers.
    unit/broker/transactions/test_rocketmq_weak_points.py
    test_w23_an_unanswered_half_does_not_delay_others
153 The program: ten messages, five tags, UNKNOW first, the index modulo 3 at the check.
    test_the_sample_program_delivers_every_third_message
154 The program is among the examples.
    e2e/test_examples.py test_the_listener_example_shows_what_became_of_each_message
155 An id that the checker does not know is committed: the program decides that.
    test_the_sample_program_commits_a_transaction_of_its_predecessor
156 Bob pays Smith 100.
    e2e/test_examples.py test_the_script_makes_one_transfer_in_each_run
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from escrowmq import (
    Message,
    ReceivedMessage,
    TransactionListener,
    TransactionProducer,
    Verdict,
)
from tests.articles.conftest import StartBroker
from tests.interop.apache import ApacheRocketMQ, wait_for_route
from tests.interop.producers import QUEUES, TOPIC, Producer
from tests.interop.remoting import COMMIT, HALF_TOPIC, OP_TOPIC, Client
from tests.support.clients import Broker
from tests.support.raw_transactions import CHECKS_MAX, stranded_bodies
from tests.support.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.slow

SAMPLE_TOPIC = "TopicTest1234"
SAMPLE_GROUP = "please_rename_unique_group_name"
TAGS = ["TagA", "TagB", "TagC", "TagD", "TagE"]


# --- messages 1 to 4 -----------------------------------------------------------------------------


def cursors(client: Client) -> tuple[int | None, int | None]:
    return (
        client.committed_offset("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0),
        client.committed_offset("CID_RMQ_SYS_TRANS", OP_TOPIC, 0),
    )


def ends(client: Client) -> tuple[int, int]:
    return client.max_offset(HALF_TOPIC, 0), client.max_offset(OP_TOPIC, 0)


def test_the_cursors_after_messages_1_to_4(start_broker: StartBroker, tmp_path: Path) -> None:
    with start_broker(tmp_path) as broker, Producer(broker.address) as producer:
        client = producer.client
        client.create_topic(TOPIC, queues=QUEUES)
        producer.park_and_end(["1", "2", "3"], COMMIT)
        wait_until(lambda: cursors(client) == (3, 3), lambda: f"cursors: {cursors(client)}")
        assert ends(client) == (3, 3)

        producer.park("4")
        producer.respond_until(lambda: producer.checks["4"] > 0, {})
        half_end, op_end = ends(client)
        if isinstance(broker, ApacheRocketMQ):
            assert half_end >= 5, "4 was not appended again"
        else:
            assert half_end == 4
        assert op_end == 3

        producer.respond_until(lambda: producer.delivered()["4"] == 1, {"4": COMMIT})
        wait_until(
            lambda: cursors(client) == ends(client),
            lambda: f"cursors: {cursors(client)}, ends: {ends(client)}",
        )
        assert cursors(client)[1] == 4


def test_the_cursors_after_messages_5_to_7(start_broker: StartBroker, tmp_path: Path) -> None:
    with start_broker(tmp_path) as broker, Producer(broker.address) as producer:
        client = producer.client
        client.create_topic(TOPIC, queues=QUEUES)
        producer.park_and_end(["1", "2", "3", "4"], COMMIT)
        wait_until(lambda: cursors(client) == (4, 4), lambda: f"cursors: {cursors(client)}")

        producer.park("5")
        producer.park("6")
        producer.park_and_end(["7"], COMMIT)
        producer.respond_until(lambda: min(producer.checks["5"], producer.checks["6"]) > 0, {})
        assert producer.checks["7"] == 0
        half_end, op_end = ends(client)
        if isinstance(broker, ApacheRocketMQ):
            assert half_end >= 9, "5 and 6 were not appended again"
        else:
            assert half_end == 7
            assert cursors(client) == (4, 4), "the op of 7 waits for 5 and 6"
        assert op_end == 5

        producer.respond_until(
            lambda: producer.delivered() == Counter("1234567"), {"5": COMMIT, "6": COMMIT}
        )
        wait_until(
            lambda: cursors(client) == ends(client),
            lambda: f"cursors: {cursors(client)}, ends: {ends(client)}",
        )
        assert cursors(client)[1] == 7


# --- the sample program --------------------------------------------------------------------------


class SampleListener(TransactionListener):
    """The listener of the articles: UNKNOWN first, then by the index of the message modulo 3."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}
        self.checks: Counter[bytes] = Counter()

    def execute_local_transaction(self, message: Message, arg: Any) -> Verdict:
        self.states[message.transaction_id] = len(self.states) % 3
        return Verdict.UNKNOWN

    def check_local_transaction(self, message: ReceivedMessage) -> Verdict:
        self.checks[message.body] += 1
        state = self.states.get(message.transaction_id, 1)
        return (Verdict.UNKNOWN, Verdict.COMMIT, Verdict.ROLLBACK)[state]


def create_sample_topic(broker: Broker, topic: str) -> None:
    with Client(broker.address) as client:
        client.create_topic(topic)
    wait_for_route(broker.namesrv_address, topic, broker.address)


def delivered(broker: Broker, topic: str) -> set[tuple[str, str, bytes]]:
    with Client(broker.address) as client:
        return {
            (record.properties["KEYS"], record.properties["TAGS"], record.body)
            for queue_id in range(4)
            for record in client.pull_all(topic, queue_id)
        }


def stranded(broker: Broker) -> list[bytes]:
    with Client(broker.address) as client:
        return [body for body in stranded_bodies(client) if body.startswith(b"Hello RocketMQ ")]


async def test_the_sample_program_delivers_every_third_message(broker: Broker) -> None:
    create_sample_topic(broker, SAMPLE_TOPIC)
    listener = SampleListener()
    bodies = [b"Hello RocketMQ %d" % number for number in range(10)]
    async with TransactionProducer(
        broker.namesrv_address, group=SAMPLE_GROUP, listener=listener
    ) as producer:
        for number, body in enumerate(bodies):
            message = Message(
                SAMPLE_TOPIC, body, tags=TAGS[number % len(TAGS)], keys=[f"KEY{number}"]
            )
            result = await producer.send_in_transaction(message, number)
            assert result.local_state is Verdict.UNKNOWN
        await wait_until_async(lambda: sorted(stranded(broker)) == bodies[0::3])
    assert delivered(broker, SAMPLE_TOPIC) == {
        (f"KEY{number}", TAGS[number % len(TAGS)], bodies[number]) for number in (1, 4, 7)
    }
    assert listener.checks == Counter(
        {body: CHECKS_MAX if number % 3 == 0 else 1 for number, body in enumerate(bodies)}
    )


async def test_the_sample_program_commits_a_transaction_of_its_predecessor(
    broker: Broker,
) -> None:
    create_sample_topic(broker, "TopicTestRestart")
    message = Message("TopicTestRestart", b"before the restart", tags="TagA", keys=["KEY0"])
    options: dict[str, Any] = {"group": f"{SAMPLE_GROUP}_restart"}
    async with TransactionProducer(
        broker.namesrv_address, listener=SampleListener(), **options
    ) as producer:
        await producer.send_in_transaction(message)
    async with TransactionProducer(broker.namesrv_address, listener=SampleListener(), **options):
        await wait_until_async(
            lambda: delivered(broker, "TopicTestRestart") == {("KEY0", "TagA", message.body)}
        )
