"""Make dead letters and look at what consumers get."""

from __future__ import annotations

from typing import Any

from escrowmq import Message, ReceivedMessage
from escrowmq.blocking import Consumer, Producer
from tests.interop.records import Record
from tests.support.clients import Broker
from tests.support.waiting import wait_until

WAIT_S = 60.0


def send_and_bury(
    broker: Broker,
    group: str,
    *messages: Message,
    cause: BaseException | str = "no reason",
    **options: Any,
) -> list[ReceivedMessage]:
    """Send messages to a topic of their own, and let the group give each of them up at once."""
    topic = messages[0].topic
    # A broker that has just started may respond late, and a repeated send would be stored twice.
    with Producer(broker.namesrv_address, group="p", timeout_s=WAIT_S) as producer:
        for message in messages:
            producer.send(message)
    return bury(broker, group, topic, len(messages), cause=cause, **options)


def bury(
    broker: Broker,
    group: str,
    topic: str,
    count: int,
    *,
    cause: BaseException | str = "no reason",
    **options: Any,
) -> list[ReceivedMessage]:
    """Receive messages and move each to the dead letters of the group. Return them."""
    messages: list[ReceivedMessage] = []
    with Consumer(
        broker.namesrv_address, group=group, subscribe={topic: "*"}, **options
    ) as consumer:
        for _ in range(count):
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None, f"{len(messages)} of {count} messages arrived"
            messages.append(message)
            consumer.dead_letter(message, cause=cause)
    return messages


def receive_all(broker: Broker, group: str, topic: str, count: int) -> list[ReceivedMessage]:
    """Receive messages of a group, acknowledge them, and check that the group has no others."""
    messages: list[ReceivedMessage] = []
    with Consumer(broker.namesrv_address, group=group, subscribe={topic: "*"}) as consumer:
        while len(messages) < count:
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None, f"{len(messages)} of {count} messages arrived"
            messages.append(message)
        assert consumer.receive(timeout_s=0.2) is None
    return messages


def copies(server: Any, group: str) -> list[Record]:
    """Return what the retry topic of a group has."""
    with server.client() as client:
        return list(client.pull_all(f"%RETRY%{group}", 0))


def wait_for_copies(server: Any, group: str, count: int) -> None:
    wait_until(lambda: len(copies(server, group)) >= count, f"{count} copies for {group}")
