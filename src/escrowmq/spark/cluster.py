"""What the driver asks of name servers and brokers: routes, topics, offsets, sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import InvalidOption, NoRoute, NotSent, RequestRefused, TransportError
from escrowmq.message import names
from escrowmq.message.names import is_internal_topic
from escrowmq.parsing import did_you_mean, parse_servers
from escrowmq.remoting.bodies import TopicList, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    Header,
    NoFields,
    PullMessage,
    QueryConsumerOffset,
    QueueHeader,
    SearchOffset,
    UpdateConsumerOffset,
)
from escrowmq.remoting.headers_admin import GetRoute
from escrowmq.spark.line import BlockingConnection, BlockingReply, OutgoingRequest
from escrowmq.spark.offsets import Offsets, QueueKey
from escrowmq.spark.options import SparkAccess
from escrowmq.spark.range_pull import PULL_SUBSCRIPTION_FLAG

ROUTE_TTL_S: Final = 5.0
_READ_PERMISSION: Final = 4
_VERSION_5: Final = 413  # as headers number it
TRANSACTION_TOPICS: Final = (
    names.HALF_TOPIC,
    names.OP_TOPIC,
    names.STRANDED_TOPIC,
    names.JOURNAL_TOPIC,
    names.DECISION_TOPIC,
)


class ReadCluster:
    """Lines are made when they are wanted, and made again once if they broke."""

    def __init__(self, servers: str, access: SparkAccess, clock: Clock | None = None) -> None:
        self._servers = parse_servers(servers)
        self._access = access
        self._clock = SystemClock() if clock is None else clock
        self._connections: dict[str, BlockingConnection] = {}
        self._routes: dict[str, tuple[float, dict[QueueKey, str]]] = {}

    def close(self) -> None:
        for line in self._connections.values():
            line.close()
        self._connections.clear()

    # --- name servers ----------------------------------------------------------------------------

    def route(self, topic: str) -> dict[QueueKey, str]:
        """Its queues that can be read, and the addresses of their brokers. Raises NoRoute."""
        known = self._routes.get(topic)
        now_s = self._clock.elapsed_s()
        if known is None or now_s - known[0] > ROUTE_TTL_S:
            known = now_s, self._fetch_route(topic)
            self._routes[topic] = known
        return known[1]

    def topics(self) -> list[str]:
        reply = self._call_name_server(
            OutgoingRequest(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, NoFields())
        )
        return sorted(decode_body(TopicList, reply.body).topic_list)

    def topics_matching(self, pattern: str, *, include_system: bool) -> list[str]:
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise InvalidOption(f"option subscribePattern {pattern!r}: {error}") from error
        return [
            topic
            for topic in self.topics()
            if wanted.fullmatch(topic) and (include_system or not is_internal_topic(topic))
        ]

    def _fetch_route(self, topic: str) -> dict[QueueKey, str]:
        fields = GetRoute(topic=topic, accept_standard_json_only=True)
        try:
            reply = self._call_name_server(
                OutgoingRequest(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
            )
        except RequestRefused as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise NoRoute(
                f"no broker has a topic {topic!r}{did_you_mean(topic, self.topics())}"
            ) from error
        told = decode_body(TopicRoute, reply.body)
        addresses = {
            broker.broker_name: broker.broker_addrs[min(broker.broker_addrs)]
            for broker in told.broker_datas
            if broker.broker_addrs  # the master is number 0; a slave can be read as well
        }
        return {
            QueueKey(topic, entry.broker_name, queue_id): addresses[entry.broker_name]
            for entry in told.queue_datas
            if entry.perm & _READ_PERMISSION and entry.broker_name in addresses
            for queue_id in range(entry.read_queue_nums)
        }

    def _call_name_server(self, request: OutgoingRequest) -> BlockingReply:
        failures: list[str] = []
        for address in self._servers:
            try:
                [reply] = self._call_all(address, [request])
            except TransportError as error:
                failures.append(str(error))
                continue
            if reply.code:
                raise RequestRefused(reply.code, reply.remark)
            return reply
        raise NotSent(f"no name server answers (option servers): {'; '.join(failures)}")

    # --- brokers ---------------------------------------------------------------------------------

    def offset_bounds(self, queues: Mapping[QueueKey, str]) -> dict[QueueKey, tuple[int, int]]:
        """The first offset of each, and the one behind its last."""
        both = (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET)
        wanted = {
            queue: [
                OutgoingRequest(code, QueueHeader(topic=queue.topic, queue_id=queue.queue_id))
                for code in both
            ]
            for queue in queues
        }
        found = self._call_per_queue(queues, wanted)
        return {
            queue: (_reply_offset(low), _reply_offset(high)) for queue, (low, high) in found.items()
        }

    def offsets_at_times(
        self, queues: Mapping[QueueKey, str], times_ms: Mapping[QueueKey, int]
    ) -> Offsets:
        wanted = {queue: [_search_request(queue, time_ms)] for queue, time_ms in times_ms.items()}
        found = self._call_per_queue(queues, wanted)
        return {queue: _reply_offset(reply) for queue, (reply,) in found.items()}

    def group_offsets(self, group: str, queues: Mapping[QueueKey, str]) -> Offsets:
        """Of those queues of which the group has one."""
        wanted = {
            queue: [OutgoingRequest(*_group_offset_request(group, queue))] for queue in queues
        }
        found = self._call_per_queue(queues, wanted, allowed_codes=(ResponseCode.QUERY_NOT_FOUND,))
        return {
            queue: _reply_offset(reply) for queue, (reply,) in found.items() if _has_offset(reply)
        }

    def set_group_offsets(
        self, group: str, queues: Mapping[QueueKey, str], offsets: Offsets
    ) -> None:
        wanted: dict[QueueKey, list[OutgoingRequest]] = {}
        for queue, offset in offsets.items():
            fields = UpdateConsumerOffset(
                consumer_group=group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                commit_offset=offset,
            )
            wanted[queue] = [OutgoingRequest(RequestCode.UPDATE_CONSUMER_OFFSET, fields)]
        self._call_per_queue(queues, wanted)

    def create_group(self, group: str, queues: Mapping[QueueKey, str]) -> None:
        """Brokers make a group when it pulls for the first time, and only then know its offsets."""
        one_of_each = {address: queue for queue, address in queues.items()}
        for address, queue in one_of_each.items():
            fields = PullMessage(
                consumer_group=group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=PULL_SUBSCRIPTION_FLAG,
                subscription="*",
                expression_type="TAG",
            )
            [reply] = self._call_all(address, [OutgoingRequest(RequestCode.PULL_MESSAGE, fields)])
            if reply.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise RequestRefused(
                    reply.code, f"{address} has no group {group} and makes none: create it there"
                )

    def connection_to(self, address: str) -> BlockingConnection:
        line = self._connections.get(address)
        if line is None:
            line = self._connections[address] = BlockingConnection(address, self._access)
        return line

    def _call_per_queue(
        self,
        queues: Mapping[QueueKey, str],
        requests: Mapping[QueueKey, Sequence[OutgoingRequest]],
        allowed_codes: tuple[int, ...] = (),
    ) -> dict[QueueKey, list[BlockingReply]]:
        """Everything that one broker is asked goes to it at once."""
        by_address: dict[str, list[QueueKey]] = {}
        for queue in requests:
            by_address.setdefault(queues[queue], []).append(queue)
        found: dict[QueueKey, list[BlockingReply]] = {}
        for address, keys in by_address.items():
            replies = iter(self._call_all(address, [one for key in keys for one in requests[key]]))
            for key in keys:
                found[key] = [next(replies) for _ in requests[key]]
                for reply in found[key]:
                    if reply.code and reply.code not in allowed_codes:
                        raise RequestRefused(reply.code, f"{address}: {key}: {reply.remark}")
        return found

    def _call_all(self, address: str, requests: Sequence[OutgoingRequest]) -> list[BlockingReply]:
        was_there = address in self._connections
        try:
            return self.connection_to(address).call_all(requests)
        except TransportError:
            self.disconnect(address)
            if not was_there:
                raise
        return self.connection_to(address).call_all(requests)

    def disconnect(self, address: str) -> None:
        line = self._connections.pop(address, None)
        if line is not None:
            line.close()


def _search_request(queue: QueueKey, time_ms: int) -> OutgoingRequest:
    fields = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=time_ms)
    return OutgoingRequest(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, fields)


def _group_offset_request(group: str, queue: QueueKey) -> tuple[int, Header]:
    fields = QueryConsumerOffset(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        set_zero_if_not_found=False,
    )
    return RequestCode.QUERY_CONSUMER_OFFSET, fields


def _has_offset(reply: BlockingReply) -> bool:
    """RocketMQ 4 says 0 where there is none, whatever it was asked."""
    return not reply.code and not (reply.version < _VERSION_5 and _reply_offset(reply) == 0)


def _reply_offset(reply: BlockingReply) -> int:
    return int(reply.ext_fields["offset"])
