"""Resets of consumer groups: planning and applying."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.admin.offsets import EARLIEST, LATEST, StartPosition, apply_reset, plan_reset
from escrowmq.errors import NoRoute
from escrowmq.remoting.bodies_admin import ConsumeOffset, encode_queue_table
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import OffsetResponse
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_broker import ScriptedBroker, json_response, queue_name

TIME_MS = 1_700_000_000_000


def progress(**consumer_offsets: int) -> bytes:
    """Return the progress of a group in queue 0 of these topics. RETRY_ stands for %RETRY%."""
    table = {
        queue_name(topic.replace("RETRY_", "%RETRY%"), 0): ConsumeOffset(
            broker_offset=9, consumer_offset=offset, pull_offset=0, last_timestamp=0
        )
        for topic, offset in consumer_offsets.items()
    }
    return encode_queue_table(table)


def serve_group(broker: ScriptedBroker, body: bytes) -> None:
    broker.responses[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = json_response(
        b'{"subscriptionGroupTable":{"pay":{"groupName":"pay"}}}'
    )
    broker.responses[RequestCode.GET_CONSUME_STATS] = json_response(body)
    broker.serve_topic("orders", (2, 9))
    broker.responses[RequestCode.SEARCH_OFFSET_BY_TIMESTAMP] = lambda request: encode_response(
        request, OffsetResponse(offset=7)
    )


@pytest.mark.parametrize(("target", "new_offset"), [(EARLIEST, 2), (LATEST, 9), (TIME_MS, 7)])
def test_a_plan_has_the_old_and_the_new_offset(target: StartPosition, new_offset: int) -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve_group(broker, progress(orders=5))
        [change] = plan_reset(cluster, "pay", None, target)
    assert change.queue == queue_name("orders", 0)
    assert (change.old_offset, change.new_offset) == (5, new_offset)


def test_the_retry_topic_is_reset_only_if_it_is_named() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve_group(broker, progress(orders=5, RETRY_pay=1))
        [change] = plan_reset(cluster, "pay", None, LATEST)
        assert change.queue.topic == "orders"
        broker.serve_topic("%RETRY%pay", (0, 3))
        [change] = plan_reset(cluster, "pay", "%RETRY%pay", LATEST)
        assert (change.queue.topic, change.new_offset) == ("%RETRY%pay", 3)


def test_a_group_that_no_broker_has_is_an_error() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve_group(broker, progress())
        with pytest.raises(NoRoute, match="there is no group missing-group"):
            plan_reset(cluster, "missing-group", None, EARLIEST)


@pytest.mark.parametrize(("target", "timestamp"), [(EARLIEST, 0), (LATEST, -1), (TIME_MS, TIME_MS)])
def test_a_reset_is_sent_as_a_timestamp(target: StartPosition, timestamp: int) -> None:
    resets: list[Any] = []

    def reset(request: Request[Any]) -> bytes:
        resets.append(request.head.fields)
        return encode_response(request, body=encode_queue_table({queue_name("orders", 0): 2}))

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        serve_group(broker, progress(orders=5))
        broker.responses[RequestCode.INVOKE_BROKER_TO_RESET_OFFSET] = reset
        changes = plan_reset(cluster, "pay", None, target)
        [applied] = apply_reset(cluster, "pay", changes, target)
    assert (applied.queue, applied.offset) == (queue_name("orders", 0), 2)
    [header] = resets
    assert (header.topic, header.group, header.timestamp) == ("orders", "pay", timestamp)
    assert header.is_force  # otherwise a broker refuses to move forward
