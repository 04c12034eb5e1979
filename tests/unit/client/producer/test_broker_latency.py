"""Which brokers are avoided, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.client.messages import MessageQueue
from escrowmq.client.producer.sender import LatencyFaultTolerance, avoidance_s

A, B, C = (MessageQueue("t", name, 0) for name in "abc")


@pytest.mark.parametrize(
    ("latency_s", "expected_s"),
    [(0.0, 0), (0.54, 0), (0.55, 2), (1.8, 5), (3.0, 6), (5.0, 10), (14.9, 10), (15.0, 30)],
)
def test_a_slow_broker_is_avoided_for_a_time(latency_s: float, expected_s: float) -> None:
    assert avoidance_s(latency_s) == expected_s


@given(st.floats(0, 100), st.floats(0, 100))
def test_a_slower_broker_is_not_avoided_for_less_time(first_s: float, second_s: float) -> None:
    fast_s, slow_s = sorted((first_s, second_s))
    assert avoidance_s(fast_s) <= avoidance_s(slow_s)


def test_a_broker_that_failed_is_avoided_until_its_time_ends() -> None:
    faults = LatencyFaultTolerance()
    faults.record_failure("a", 100.0)
    assert list(faults.usable_queues([A, B], set(), 101.0)) == [B]
    assert list(faults.usable_queues([A, B], set(), 110.0)) == [A, B]


def test_a_quick_response_ends_the_avoidance() -> None:
    faults = LatencyFaultTolerance()
    faults.record_failure("a", 100.0)
    faults.record_response("a", 0.01, 101.0)
    assert list(faults.usable_queues([A, B], set(), 101.0)) == [A, B]


def test_if_all_brokers_are_avoided_the_one_whose_time_ends_first_is_used() -> None:
    faults = LatencyFaultTolerance()
    faults.record_failure("a", 100.0)
    faults.record_response("b", 0.6, 100.0)
    faults.record_response("c", 4.0, 100.0)
    assert list(faults.usable_queues([A, B, C], set(), 101.0)) == [B]
    assert list(faults.usable_queues([A, B, C], {"b"}, 101.0)) == [C]


def test_brokers_that_were_tried_are_used_only_if_there_is_no_other() -> None:
    faults = LatencyFaultTolerance()
    assert list(faults.usable_queues([A, B], {"a"}, 0.0)) == [B]
    assert list(faults.usable_queues([A], {"a"}, 0.0)) == [A]
