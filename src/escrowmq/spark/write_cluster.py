"""What the name servers say: which brokers there are, and which queues a topic has."""

from __future__ import annotations

import threading
from typing import Final

from escrowmq.clock import SystemClock
from escrowmq.errors import NoRoute, NotSent, RequestRefused, TransportError
from escrowmq.message.names import TEMPLATE_TOPIC
from escrowmq.parsing import parse_servers
from escrowmq.remoting.bodies import ClusterInfo, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import Header
from escrowmq.remoting.headers_admin import GetRoute
from escrowmq.remoting.requests import Body
from escrowmq.spark.options import SparkAccess
from escrowmq.spark.row_encoding import QueueAddress
from escrowmq.spark.send_pipeline import SendConnection

CREATED_QUEUES: Final = 4
_WRITE_PERMISSION, _MASTER_ID = 2, 0
_RETRY_DELAY_S: Final = 0.5
_TOPIC_TIMEOUT_S: Final = 5.0  # a broker that is just being started has not said yet what it has
_clock = SystemClock()
_sleep = threading.Event().wait  # nobody sets it


class WriteCluster:
    """Answers are kept: it lives as long as a task, or one decision."""

    def __init__(self, servers: str, access: SparkAccess, *, timeout_s: float) -> None:
        self.access = access
        self._servers = parse_servers(servers)
        self._timeout_s = timeout_s
        self._queues: dict[str, list[QueueAddress]] = {}

    def brokers(self, required_broker: str = "") -> dict[str, str]:
        """The masters: name and address, in the order of their names.

        Whoever was killed is unknown until he is back: one that is wanted, or any at all, is
        waited for. Raises NotSent.
        """
        deadline_s = _clock.elapsed_s() + self._timeout_s
        while True:
            known = decode_body(
                ClusterInfo, self._call_name_server(RequestCode.GET_BROKER_CLUSTER_INFO)
            )
            found = {
                name: entry.broker_addrs[_MASTER_ID]
                for name, entry in sorted(known.broker_addr_table.items())
                if _MASTER_ID in entry.broker_addrs
            }
            if required_broker in found or (found and not required_broker):
                return found
            if _clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                raise NotSent(
                    f"{';'.join(self._servers)} knows no broker {required_broker}: start "
                    "it, then the job "
                    "again. If it holds decisions of a sink, no other can take its place"
                )
            _sleep(_RETRY_DELAY_S)

    def queues(self, topic: str) -> list[QueueAddress]:
        """Those that can be written, of a topic that is there or may be made."""
        found = self._queues.get(topic)
        if found is None:
            found = self._queues[topic] = self._find_queues(topic)
        return found

    def _find_queues(self, topic: str) -> list[QueueAddress]:
        deadline_s = _clock.elapsed_s() + min(_TOPIC_TIMEOUT_S, self._timeout_s)
        while True:
            found = self._fetch_queues(topic, topic)
            if found is None:
                made = self._fetch_queues(TEMPLATE_TOPIC, topic) or []
                found = [target for target in made if target.queue_id < CREATED_QUEUES]
            if found:
                return found
            if _clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                raise NoRoute(
                    f"there is no topic {topic} that can be written to, and no broker makes it by "
                    "itself: create it first, look at its permissions, or set autoCreateTopicEnable"
                )
            _sleep(_RETRY_DELAY_S)

    def _fetch_queues(self, route_topic: str, topic: str) -> list[QueueAddress] | None:
        try:
            fields = GetRoute(topic=route_topic, accept_standard_json_only=True)
            body = self._call_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
        except RequestRefused as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                return None
            raise
        route = decode_body(TopicRoute, body)
        masters = {
            broker.broker_name: broker.broker_addrs[_MASTER_ID]
            for broker in route.broker_datas
            if _MASTER_ID in broker.broker_addrs
        }
        return [
            QueueAddress(topic, entry.broker_name, masters[entry.broker_name], queue_id)
            for entry in sorted(route.queue_datas, key=lambda entry: entry.broker_name)
            if entry.perm & _WRITE_PERMISSION and entry.broker_name in masters
            for queue_id in range(entry.write_queue_nums)
        ]

    def _call_name_server(self, code: RequestCode, header: Header | None = None) -> Body:
        """Of the first that answers. Raises RequestRefused, or NotSent once the time is up."""
        deadline_s = _clock.elapsed_s() + self._timeout_s
        while True:
            failures = []
            for address in self._servers:
                line = SendConnection(address, self.access, timeout_s=min(1.0, self._timeout_s))
                try:
                    return line.call(code, header)
                except TransportError as error:
                    failures.append(str(error))
                finally:
                    line.close()
            if _clock.elapsed_s() + _RETRY_DELAY_S > deadline_s:
                raise NotSent(
                    f"no name server answers ({'; '.join(failures)}): check option servers, and "
                    "that one of them runs"
                )
            _sleep(_RETRY_DELAY_S)
