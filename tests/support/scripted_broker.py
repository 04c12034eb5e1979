"""A broker for tests of escrowmq.admin that responds by request code, over a real socket.

with ScriptedBroker() as broker, broker.cluster() as cluster:
    broker.responses[RequestCode.GET_BROKER_CONFIG] = lambda request: encode_response(...)
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from escrowmq.admin import Cluster
from escrowmq.remoting.bodies import QueueName
from escrowmq.remoting.bodies_admin import TopicOffset, encode_queue_table
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_server import Respond, ScriptedServer


class ScriptedBroker:
    """A broker whose responses a test sets."""

    def __init__(self) -> None:
        self.responses: dict[int, Respond] = {}
        self._server = ScriptedServer(self._respond)
        self.address = self._server.address
        self.requests = self._server.requests

    def __enter__(self) -> ScriptedBroker:
        self._server.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def cluster(self) -> Cluster:
        return Cluster("", broker=self.address)

    def disconnect_all(self) -> None:
        self._server.disconnect_all()

    def serve_topic(self, topic: str, *bounds: tuple[int, int]) -> None:
        """Respond to statistics requests for a topic. `bounds` has (first, end) of each queue."""

        def respond(request: Request[Any]) -> bytes:
            if request.head.fields.topic != topic:
                return encode_response(request, code=ResponseCode.TOPIC_NOT_EXIST, remark="none")
            table = {
                queue_name(topic, number): TopicOffset(
                    min_offset=first, max_offset=end, last_update_timestamp=0
                )
                for number, (first, end) in enumerate(bounds)
            }
            return encode_response(request, body=encode_queue_table(table))

        self.responses[RequestCode.GET_TOPIC_STATS_INFO] = respond

    def _respond(self, request: Request[Any]) -> bytes | None:
        return self.responses[request.head.code](request)


def queue_name(topic: str, queue_id: int) -> QueueName:
    return QueueName(topic=topic, broker_name="broker-a", queue_id=queue_id)


def json_response(body: bytes) -> Respond:
    return lambda request: encode_response(request, body=body)
