"""The route of a topic, decoded from what a name server responds.

`Routes` of the asyncio client and `admin.Cluster` share it. It imports no asyncio, because commands
and Spark's tasks run no event loop and should start quickly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from escrowmq.client.messages import MessageQueue
from escrowmq.errors import BrokenResponse
from escrowmq.message.names import has_control_characters
from escrowmq.parsing import parse_address
from escrowmq.remoting.bodies import BrokerRoute, QueueRoute, TopicRoute

MASTER_ID: Final = 0
_SHOWN_LENGTH_MAX: Final = 100  # of a server's text that an error repeats
_READ_PERMISSION: Final = 4
_WRITE_PERMISSION: Final = 2
QUEUES_MAX: Final = 100_000  # of one topic; a route with more is refused before they are listed


@dataclass(frozen=True, slots=True)
class Route:
    """The queues of one topic and the addresses of their brokers."""

    topic: str
    writable_queues: tuple[MessageQueue, ...]
    readable_queues: tuple[MessageQueue, ...]
    broker_addresses: dict[str, str]  # broker name -> address of its master
    reader_addresses: dict[str, str]  # broker name -> address to read from; see parse_route
    is_template: bool = False  # the topic does not exist yet; the first send creates it


def parse_route(topic: str, topic_route: TopicRoute, *, include_replicas: bool = False) -> Route:
    """Return the queues that a name server lists for a topic, sorted by broker and number.

    A broker without a master is left out, because it takes no sends. With `include_replicas` its
    queues are readable, and `reader_addresses` has the replica with the lowest number. A broker
    that is listed twice counts once. Raises BrokenResponse for an impossible number of queues, an
    invalid address or name, or two addresses of one broker.
    """
    _check_brokers(topic, topic_route.broker_datas)
    masters = {
        broker.broker_name: broker.broker_addrs[MASTER_ID]
        for broker in topic_route.broker_datas
        if MASTER_ID in broker.broker_addrs
    }
    readers = masters
    if include_replicas:
        readers = {
            broker.broker_name: broker.broker_addrs[min(broker.broker_addrs)]
            for broker in topic_route.broker_datas
            if broker.broker_addrs
        }
    entries = {entry.broker_name: entry for entry in topic_route.queue_datas}
    _check_queue_counts(topic, entries.values())
    writable: list[MessageQueue] = []
    readable: list[MessageQueue] = []
    for entry in sorted(entries.values(), key=lambda entry: entry.broker_name):
        for permission, count, addresses, queues in (
            (_WRITE_PERMISSION, entry.write_queue_nums, masters, writable),
            (_READ_PERMISSION, entry.read_queue_nums, readers, readable),
        ):
            if entry.perm & permission and entry.broker_name in addresses:
                queues += (
                    MessageQueue(topic, entry.broker_name, queue_id) for queue_id in range(count)
                )
    return Route(topic, tuple(writable), tuple(readable), masters, readers)


def _check_brokers(topic: str, brokers: Iterable[BrokerRoute]) -> None:
    addresses: dict[tuple[str, int], str] = {}
    for broker in brokers:
        name = broker.broker_name
        if has_control_characters(name):
            raise BrokenResponse(
                f"the route of topic {topic} has a broker name with control characters: "
                f"{name[:_SHOWN_LENGTH_MAX]!r}"
            )
        for broker_id, address in broker.broker_addrs.items():
            try:
                parse_address(address)
            except ValueError as error:
                raise BrokenResponse(
                    f"the route of topic {topic} has an invalid address of broker "
                    f"{name[:_SHOWN_LENGTH_MAX]!r}: {address[:_SHOWN_LENGTH_MAX]!r}"
                ) from error
            other = addresses.setdefault((name, broker_id), address)
            if other != address:
                # A message or an offset would go to one of two brokers, and it is unknown to which.
                raise BrokenResponse(
                    f"the route of topic {topic} has two addresses of broker "
                    f"{name[:_SHOWN_LENGTH_MAX]!r} with id {broker_id}: {other} and {address}; "
                    "give each broker a name of its own"
                )


def _check_queue_counts(topic: str, entries: Iterable[QueueRoute]) -> None:
    total = 0
    for entry in entries:
        counts = (entry.read_queue_nums, entry.write_queue_nums)
        total += max(counts)
        if min(counts) < 0 or total > QUEUES_MAX:
            raise BrokenResponse(
                f"the route of topic {topic} has {counts[0]} readable and {counts[1]} writable "
                f"queues on broker {entry.broker_name[:_SHOWN_LENGTH_MAX]!r}; "
                f"a topic has at most {QUEUES_MAX}"
            )
