"""Flow control: which sends each limit refuses, and until when."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.config import Config, OverloadConfig, StoreConfig
from escrowmq.config.settings import FRAME_BYTES_MAX, MIB
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import FakeChannel, bodies, pull_request, send_request
from tests.support.stores import HOST, NOW_MS, TINY, open_store

OK, BUSY = 0, 2


class Bench:
    def __init__(self, store: StoreConfig = TINY, **limits: Any) -> None:
        disk = MemoryDisk()
        self.store = open_store(disk, store)
        self.config = Config(store=store, overload=OverloadConfig(**limits))
        keys = UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2)
        self.broker = Broker(disk, self.store, self.config, keys, store_host=HOST)
        self.channel = FakeChannel()

    def codes(
        self, *requests: Any, at_ms: int = NOW_MS, channel: FakeChannel | None = None
    ) -> list[int]:
        channel = channel or self.channel
        for request in requests:
            self.broker.handle(channel, request, at_ms)
        self.broker.end_turn(at_ms)
        return [answer.code for answer in channel.responses()]


def sends(count: int, **changes: Any) -> list[Any]:
    return [send_request(**changes) for _ in range(count)]


def test_each_connection_has_a_rate_of_its_own() -> None:
    bench = Bench(connection_sends_max=3)
    assert sorted(bench.codes(*sends(5))) == [OK, OK, OK, BUSY, BUSY]
    assert bench.codes(*sends(3), channel=FakeChannel("127.0.0.1:2")) == [OK, OK, OK]
    assert bench.codes(*sends(1), at_ms=NOW_MS + 100) == [OK]  # a third of one is back
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


def item(body: bytes) -> bytes:
    return struct.pack(">iiiii", 22 + len(body), 0, 0, 0, len(body)) + body + b"\0\0"


def test_each_message_of_a_batch_counts() -> None:
    bench = Bench(connection_sends_max=3)
    batch = send_request(body=item(b"a") + item(b"b") + item(b"c") + item(b"d"), batch=True)
    assert bench.codes(batch) == [OK]
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
    bench.broker.tick(NOW_MS + 100)
    bench.broker.end_turn(NOW_MS + 100)
    assert bench.codes(send_request()) == [OK]
    assert len(bodies(bench.store, "T")) == 3
    assert bench.broker.flow_control.refused_by_limit == {"unflushed": 1}


def test_limits_change_at_run_time_and_are_skipped_when_there_are_none() -> None:
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
    # Private: what stays in memory has no public view.
    assert not bench.broker.flow_control._buckets
