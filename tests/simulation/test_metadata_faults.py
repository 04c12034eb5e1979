"""Every call of the disk fails once while topics, groups and offsets are changed.

A change that is answered with success survives a power cut. A change that is answered with an error
is undone: the broker behaves as if it had not been requested.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from escrowmq.errors import StoreError, StoreFailed, StoreFull
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import NoFields, UpdateConsumerOffset
from escrowmq.remoting.headers_admin import (
    CloneGroupOffset,
    CreateTopic,
    DeleteGroup,
    ResetOffset,
    TopicHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.testing.disks import FaultyDisk
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import new_request, send_request

QUEUES = {"readQueueNums": 4, "writeQueueNums": 4}


def create_topic(name: str, perm: int = 6) -> Request[Any]:
    fields = CreateTopic(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=4,
        write_queue_nums=4,
        perm=perm,
        topic_filter_type="SINGLE_TAG",
    )
    return new_request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)


def create_group(name: str, retries: int = 16) -> Request[Any]:
    body = b'{"groupName":"%s","retryMaxTimes":%d}' % (name.encode(), retries)
    return new_request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields(), body)


def reset_offsets() -> Request[Any]:
    fields = ResetOffset(topic="T", group="g", timestamp=0, is_force=True, offset=1, queue_id=0)
    return new_request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)


def clone_offsets() -> Request[Any]:
    fields = CloneGroupOffset(src_group="g", dest_group="other", topic="T")
    return new_request(RequestCode.CLONE_GROUP_OFFSET, fields)


def delete_group() -> Request[Any]:
    fields = DeleteGroup(group_name="g", clean_offset=True)
    return new_request(RequestCode.DELETE_SUBSCRIPTIONGROUP, fields)


CHANGES: dict[str, Callable[[], Request[Any]]] = {
    "create a topic": lambda: create_topic("new"),
    "change a topic": lambda: create_topic("T", perm=4),
    "create a group": lambda: create_group("new"),
    "change a group": lambda: create_group("g", retries=3),
    "delete a group": delete_group,
    "reset offsets": reset_offsets,
    "clone offsets": clone_offsets,
}


def filled() -> BrokerBench:
    bench = BrokerBench(FaultyDisk())
    bench.turn(create_topic("T"), create_group("g"), create_group("other"))
    for number in range(3):
        bench.turn(send_request(body=b"%d" % number))
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=2)
    bench.turn(new_request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    bench.store.flush()
    bench.broker.save()
    return bench


def tables(bench: BrokerBench) -> tuple[object, ...]:
    broker = bench.broker
    offsets = {
        key: queues for key, queues in broker.offsets.dump().items() if not key.startswith("RMQ")
    }
    return broker.topics.configs(), broker.groups.configs(), offsets


def topic_and_messages(bench: BrokerBench) -> tuple[bool, int, object]:
    """Return whether the topic exists, how many messages it has, and the offsets of its group."""
    offsets = bench.broker.offsets.query("T", "g", 0)
    return bench.broker.topics.find("T") is not None, bench.store.max_offset("T", 0), offsets


@pytest.mark.parametrize("error", [StoreFailed, StoreFull])
def test_a_topic_is_deleted_or_stays_with_its_messages(error: type[StoreError]) -> None:
    before: tuple[bool, int, object] = (True, 3, 2)
    after: tuple[bool, int, object] = (False, 0, None)
    for call in itertools.count(1):
        bench = filled()
        assert isinstance(bench.disk, FaultyDisk)
        bench.disk.error = error
        bench.disk.fail_at = first_failure = bench.disk.calls + call
        request = new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T"))
        [response] = bench.turn(request)
        has_failed = bench.disk.calls >= first_failure
        bench.disk.fail_at = None
        expected = [after] if response.code == 0 else [before]
        if bench.store.has_failed:  # then the process ends, and the next start completes it
            expected = [after, before]
        else:
            assert topic_and_messages(bench) == expected[0], call
            bench.broker.save()
        restarted = BrokerBench(bench.disk.power_cut(Random(call), "none"))
        assert topic_and_messages(restarted) in expected, call
        if not has_failed:
            break
    assert call > 4


@pytest.mark.parametrize("error", [StoreFailed, StoreFull])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_durable_or_undone(
    change: Callable[[], Request[Any]], error: type[StoreError]
) -> None:
    reference = filled()
    before = tables(reference)
    assert [response.code for response in reference.turn(change())] == [0]
    after = tables(reference)
    assert before != after
    for call in itertools.count(1):
        bench = filled()
        assert isinstance(bench.disk, FaultyDisk)
        bench.disk.error = error
        bench.disk.fail_at = first_failure = bench.disk.calls + call
        [response] = bench.turn(change())
        has_failed = bench.disk.calls >= first_failure
        bench.disk.fail_at = None
        if response.code == 0:
            assert tables(bench) == after
            assert tables(BrokerBench(bench.disk.power_cut(Random(call), "none"))) == after
        else:
            assert has_failed
            assert tables(bench) == before
            # A later save makes the files agree with what was answered.
            bench.broker.save()
            assert tables(BrokerBench(bench.disk.power_cut(Random(call), "none"))) == before
        if not has_failed:
            break
    assert call > 4


def test_other_changes_of_the_turn_are_answered_with_the_same_error_and_sends_are_refused() -> None:
    bench = filled()
    assert isinstance(bench.disk, FaultyDisk)
    before = tables(bench)
    bench.disk.fail_from = bench.disk.calls + 1
    responses = bench.turn(create_topic("a"), create_group("b"), send_request(topic="c"))
    assert len(responses) == 3
    assert all(response.code != 0 for response in responses)
    assert tables(bench) == before
    bench.disk.fail_from = None
    [created] = bench.turn(create_topic("a"))
    assert created.code == 0
