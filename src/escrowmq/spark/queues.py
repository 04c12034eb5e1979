"""Queues of a cluster, as readers and the sink need them: `ReadCluster` and `WriteCluster`.

Both add to `admin.Cluster`, which finds brokers and routes and holds the connections:

    ReadCluster    readable queues with the addresses to read from; offsets of many queues at once
    WriteCluster   writable queues and masters; waits for brokers that are being restarted

A queue is a `MessageQueue`. The address of its broker is kept beside it, because a queue stays the
same when its broker moves.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from escrowmq.admin.cluster import Cluster, masters
from escrowmq.client.access import Access
from escrowmq.client.messages import MessageQueue
from escrowmq.client.sync_connection import DEFAULT_TIMEOUT_S, OutgoingRequest
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import InvalidOption, NoRoute, NotSent, RequestRefused, TransportError
from escrowmq.message import names
from escrowmq.parsing import did_you_mean
from escrowmq.remoting.bodies import ClusterInfo, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import (
    PullMessage,
    QueryConsumerOffset,
    QueueHeader,
    SearchOffset,
    UpdateConsumerOffset,
)
from escrowmq.spark.offsets import Offsets

T = TypeVar("T")
OffsetBounds = Mapping[MessageQueue, tuple[int, int]]  # the first offset, and the end

ROUTE_TTL_S: Final = 5.0
PULL_SUBSCRIPTION_FLAG: Final = 4  # the request says which subscription it wants
CREATED_QUEUES: Final = 4  # of a topic that is created by the first message
TRANSACTION_TOPICS: Final = (
    names.HALF_TOPIC,
    names.OP_TOPIC,
    names.STRANDED_TOPIC,
    names.JOURNAL_TOPIC,
    names.DECISION_TOPIC,
)
_ROCKETMQ_5: Final = 413  # remoting version of RocketMQ 5.0
_RETRY_DELAY_S: Final = 0.5
_NAME_SERVER_TIMEOUT_S: Final = 1.0
_TOPIC_TIMEOUT_S: Final = 5.0  # a broker that has just started registers its topics after a while
_sleep = threading.Event().wait  # the event is never set

# --- read ----------------------------------------------------------------------------------------


class ReadCluster(Cluster):
    """Runs in the driver: finds the queues to read, and reads and sets their offsets.

    Queries are repeated once if a connection breaks. Raises TransportError and RequestRefused.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        access: Access,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(servers, access, timeout_s=timeout_s)
        self._clock = SystemClock() if clock is None else clock
        self._queues: dict[str, tuple[float, dict[MessageQueue, str]]] = {}

    def readable_queues(self, topic: str) -> dict[MessageQueue, str]:
        """Return the queues of a topic and the addresses to read from, cached for ROUTE_TTL_S.

        Raises NoRoute.
        """
        cached = self._queues.get(topic)
        now_s = self._clock.elapsed_s()
        if cached is None or now_s - cached[0] > ROUTE_TTL_S:
            cached = self._queues[topic] = now_s, self._find_queues(topic)
        return cached[1]

    def _find_queues(self, topic: str) -> dict[MessageQueue, str]:
        try:
            route = self.route(topic, include_replicas=True)
        except NoRoute as error:
            raise NoRoute(f"{error}{did_you_mean(topic, self.topics())}") from error
        return {queue: route.reader_addresses[queue.broker] for queue in route.readable_queues}

    def topics_matching(self, pattern: str, *, include_system: bool) -> list[str]:
        """Return the topics whose whole name matches. Raises InvalidOption."""
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise InvalidOption(f"option subscribePattern {pattern!r}: {error}") from error
        topics = [topic for topic in self.topics() if expression.fullmatch(topic)]
        if include_system:
            return topics
        server_names = self.server_names()
        return [topic for topic in topics if not names.is_internal_topic(topic, server_names)]

    # --- offsets ---------------------------------------------------------------------------------

    def offset_bounds(
        self, queues: Mapping[MessageQueue, str]
    ) -> dict[MessageQueue, tuple[int, int]]:
        """Return the first offset of each queue, and the offset behind its last message."""
        codes = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        requests = {
            queue: [
                OutgoingRequest(code, QueueHeader(topic=queue.topic, queue_id=queue.queue_id))
                for code in codes
            ]
            for queue in queues
        }
        replies = self._call_per_queue(queues, requests)
        return {
            queue: (_offset_of(low), _offset_of(high)) for queue, (low, high) in replies.items()
        }

    def offsets_at_times(
        self, queues: Mapping[MessageQueue, str], times_ms: Mapping[MessageQueue, int]
    ) -> Offsets:
        """Return, per queue, the offset of the first message stored at its time or later."""
        requests = {
            queue: [
                OutgoingRequest(
                    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
                    SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms),
                )
            ]
            for queue, time_ms in times_ms.items()
        }
        replies = self._call_per_queue(queues, requests)
        return {queue: _offset_of(reply) for queue, (reply,) in replies.items()}

    def group_offsets(self, group: str, queues: Mapping[MessageQueue, str]) -> Offsets:
        """Return the offsets of a consumer group. Queues where it has none are left out."""
        requests = {
            queue: [
                OutgoingRequest(
                    RequestCode.QUERY_CONSUMER_OFFSET,
                    QueryConsumerOffset(
                        consumer_group=group,
                        topic=queue.topic,
                        queue_id=queue.queue_id,
                        set_zero_if_not_found=False,
                    ),
                )
            ]
            for queue in queues
        }
        replies = self._call_per_queue(
            queues, requests, allowed_codes=(ResponseCode.QUERY_NOT_FOUND,)
        )
        return {
            queue: _offset_of(reply) for queue, (reply,) in replies.items() if _has_offset(reply)
        }

    def set_group_offsets(
        self, group: str, queues: Mapping[MessageQueue, str], offsets: Mapping[MessageQueue, int]
    ) -> None:
        requests = {
            queue: [
                OutgoingRequest(
                    RequestCode.UPDATE_CONSUMER_OFFSET,
                    UpdateConsumerOffset(
                        consumer_group=group,
                        topic=queue.topic,
                        queue_id=queue.queue_id,
                        commit_offset=offset,
                    ),
                )
            ]
            for queue, offset in offsets.items()
        }
        self._call_per_queue(queues, requests)

    def create_group(self, group: str, queues: Mapping[MessageQueue, str]) -> None:
        """Create a consumer group at all brokers of these queues.

        Brokers create a group when it pulls for the first time, and store offsets only for groups
        that exist. Raises RequestRefused if a broker does not create groups.
        """
        queue_by_address = {address: queue for queue, address in queues.items()}
        for address, queue in queue_by_address.items():
            header = PullMessage(
                consumer_group=group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=PULL_SUBSCRIPTION_FLAG,
                subscription="*",
                expression_type="TAG",
            )
            [reply] = self._call_all(address, [OutgoingRequest(RequestCode.PULL_MESSAGE, header)])
            if reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise RequestRefused(
                    reply.code,
                    f"{address} has no consumer group {group} and does not create it: create it "
                    "there, or set autoCreateSubscriptionGroup",
                )

    def _call_per_queue(
        self,
        queues: Mapping[MessageQueue, str],
        requests: Mapping[MessageQueue, Sequence[OutgoingRequest]],
        allowed_codes: Sequence[int] = (),
    ) -> dict[MessageQueue, list[Reply]]:
        """Send the requests of all queues, pipelined per broker. Return the replies per queue."""
        queues_by_address: dict[str, list[MessageQueue]] = {}
        for queue in requests:
            queues_by_address.setdefault(queues[queue], []).append(queue)
        replies: dict[MessageQueue, list[Reply]] = {}
        for address, own_queues in queues_by_address.items():
            of_broker = iter(
                self._call_all(
                    address, [request for queue in own_queues for request in requests[queue]]
                )
            )
            for queue in own_queues:
                replies[queue] = [next(of_broker) for _ in requests[queue]]
                for reply in replies[queue]:
                    if reply.code and reply.code not in allowed_codes:
                        raise RequestRefused(reply.code, f"{address}: {queue}: {reply.remark}")
        return replies

    def _call_all(self, address: str, requests: Iterable[OutgoingRequest]) -> list[Reply]:
        requests = list(requests)
        try:
            return list(self.connection(address).call_many(requests))
        except TransportError:
            # The broker may have been restarted since the last call. The requests change nothing,
            # or the same again.
            return list(self.connection(address).call_many(requests))


def _has_offset(reply: Reply) -> bool:
    """Return whether a group has an offset. RocketMQ 4 responds with 0 if it has none."""
    return not reply.code and not (reply.version < _ROCKETMQ_5 and _offset_of(reply) == 0)


def _offset_of(reply: Reply) -> int:
    return reply.int_field("offset")


# --- write ---------------------------------------------------------------------------------------


class WriteCluster(Cluster):
    """Runs in a task of the sink, or in the driver for one decision.

    A name server or broker that is being restarted is waited for, up to `wait_s`. Queues are
    cached as long as the object lives.
    """

    def __init__(self, servers: str | Sequence[str], access: Access, *, wait_s: float) -> None:
        super().__init__(servers, access, timeout_s=min(_NAME_SERVER_TIMEOUT_S, wait_s))
        self._wait_s = wait_s
        self._clock = SystemClock()
        self._queues: dict[str, list[MessageQueue]] = {}

    def broker_addresses(self, required: str = "") -> dict[str, str]:
        """Return the addresses of the masters by name, sorted by name.

        Wait until the broker `required` is among them, or any if that is empty. Raises NotSent,
        RequestRefused.
        """
        deadline_s = self._clock.elapsed_s() + self._wait_s
        while True:
            reply = self._wait_for(
                lambda: self.call_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
            )
            addresses = dict(masters(decode_body(ClusterInfo, reply.body)))
            if required in addresses or (addresses and not required):
                return addresses
            if self._clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                raise NotSent(
                    f"{';'.join(self.servers)} knows no broker {required}: start it, then run the "
                    "job again. If it holds decisions of a sink, no other broker can replace it"
                )
            _sleep(_RETRY_DELAY_S)

    def writable_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of a topic, or those it will have if the first message creates it.

        Raises NoRoute.
        """
        queues = self._queues.get(topic)
        if queues is None:
            queues = self._queues[topic] = self._find_queues(topic)
        return queues

    def _find_queues(self, topic: str) -> list[MessageQueue]:
        deadline_s = self._clock.elapsed_s() + min(_TOPIC_TIMEOUT_S, self._wait_s)
        while True:
            queues = self._wait_for(lambda: self._queues_or_template(topic))
            if queues:
                return queues
            if self._clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                raise NoRoute(
                    f"there is no topic {topic} that can be written, and no broker creates it: "
                    "create it, check its permissions, or set autoCreateTopicEnable"
                )
            _sleep(_RETRY_DELAY_S)

    def _queues_or_template(self, topic: str) -> list[MessageQueue]:
        try:
            return list(self.route(topic).writable_queues)
        except NoRoute:
            pass
        try:
            template = self.route(names.TEMPLATE_TOPIC).writable_queues
        except NoRoute:
            return []
        return [
            queue._replace(topic=topic) for queue in template if queue.queue_id < CREATED_QUEUES
        ]

    def _wait_for(self, lookup: Callable[[], T]) -> T:
        """Repeat a look-up while no name server responds. Raises NotSent after `wait_s`."""
        deadline_s = self._clock.elapsed_s() + self._wait_s
        while True:
            try:
                return lookup()
            except TransportError as error:
                if self._clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                    raise NotSent(
                        f"{error}; check option servers, and that a name server runs"
                    ) from error
            _sleep(_RETRY_DELAY_S)
