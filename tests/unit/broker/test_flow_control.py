"""Flow control: which sends each limit refuses, and until when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from escrowmq.config import Config, OverloadConfig, StoreConfig
from escrowmq.config.settings import FRAME_BYTES_MAX, MIB
from escrowmq.message.batch import BatchItem, encode_batch
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import FakeChannel, bodies, pull_request, send_request
from tests.support.stores import NOW_MS, TINY

OK, BUSY = 0, 2


class Bench(BrokerBench):
    """A broker with limits, which are those of OverloadConfig."""

    def __init__(self, store: StoreConfig = TINY, **limits: Any) -> None:
        super().__init__(config=Config(store=store, overload=OverloadConfig(**limits)))

    def codes(
        self, *requests: Any, at_ms: int = NOW_MS, channel: FakeChannel | None = None
    ) -> list[int]:
        """Handle requests in one turn and return the codes of the responses."""
        responses = self.turn(*requests, at_ms=at_ms, channel=channel)
        return [response.code for response in responses]


def sends(count: int, **changes: Any) -> list[Any]:
    return [send_request(**changes) for _ in range(count)]


def test_each_connection_has_its_own_rate() -> None:
    bench = Bench(connection_sends_max=3)
    assert sorted(bench.codes(*sends(5))) == [OK, OK, OK, BUSY, BUSY]
    assert bench.codes(*sends(3), channel=FakeChannel("127.0.0.1:2")) == [OK, OK, OK]
    assert bench.codes(*sends(1), at_ms=NOW_MS + 100) == [OK]  # the bucket is no longer empty
    assert sorted(bench.codes(*sends(4), at_ms=NOW_MS + 2_000)) == [OK, OK, OK, BUSY]
    assert bench.broker.flow_control.refused_by_limit == {"connection": 3}


def test_a_topic_has_one_rate_for_all_connections() -> None:
    bench = Bench(topic_sends_max=2)
    assert bench.codes(*sends(2)) == [OK, OK]
    assert bench.codes(*sends(1), channel=FakeChannel("127.0.0.1:2")) == [BUSY]
    assert bench.codes(send_request("other")) == [OK]
    assert bench.broker.flow_control.refused_by_limit == {"topic": 1}


@pytest.mark.parametrize("limit", ["connection_send_bytes_max", "topic_send_bytes_max"])
def test_a_message_longer_than_the_byte_rate_is_accepted(limit: str) -> None:
    bench = Bench(TINY, **{limit: 100})
    assert bench.codes(send_request(body=b"x" * 250)) == [OK]
    assert bench.codes(send_request(body=b"x"), at_ms=NOW_MS + 1_400) == [BUSY]
    assert bench.codes(send_request(body=b"x"), at_ms=NOW_MS + 1_600) == [OK]


def test_each_message_of_a_batch_counts() -> None:
    bench = Bench(connection_sends_max=3)
    items = [BatchItem(flag=0, body=body) for body in (b"a", b"b", b"c", b"d")]
    assert bench.codes(send_request(body=encode_batch(items), batch=True)) == [OK]
    assert bench.codes(send_request(), at_ms=NOW_MS + 300) == [BUSY]
    assert bench.codes(send_request(), at_ms=NOW_MS + 400) == [OK]


def test_sends_that_the_handler_refuses_cost_nothing() -> None:
    bench = Bench(connection_sends_max=1)
    assert OK not in bench.codes(*sends(3, queue_id=99))
    assert bench.codes(send_request()) == [OK]


def test_while_the_disk_is_behind_sends_are_refused_and_pulls_are_not() -> None:
    large = replace(TINY, segment_bytes=32 * MIB, message_bytes_max=9 * MIB)
    bench = Bench(large, unflushed_bytes_max=FRAME_BYTES_MAX)
    assert bench.codes(*sends(2, body=b"x" * 9 * MIB)) == [OK, OK]
    assert bench.codes(send_request()) == [BUSY]
    assert bench.codes(pull_request()) == [OK]
    bench.store.flush()
    bench.tick(NOW_MS + 100)
    assert bench.codes(send_request()) == [OK]
    assert len(bodies(bench.store, "T")) == 3
    assert bench.broker.flow_control.refused_by_limit == {"unflushed": 1}


def test_limits_can_be_set_and_removed_at_run_time() -> None:
    bench = Bench()
    assert not bench.broker.flow_control.is_limiting
    limited = replace(bench.config, overload=OverloadConfig(topic_sends_max=1))
    bench.broker.change_config(limited)
    assert sorted(bench.codes(*sends(2))) == [OK, BUSY]
    bench.broker.change_config(bench.config)
    assert bench.codes(*sends(5)) == [OK] * 5
    assert not bench.broker.flow_control.is_limiting


def test_closed_connections_and_idle_topics_are_purged() -> None:
    bench = Bench(connection_sends_max=1, topic_sends_max=1)
    for number in range(100):
        channel = FakeChannel(f"127.0.0.1:{number}")
        bench.codes(send_request(f"t{number}"), channel=channel)
        bench.broker.channel_closed(channel)
    bench.broker.tick(NOW_MS + 20_000)
    # Private: no response shows the buckets that stay in memory.
    assert not bench.broker.flow_control._buckets
