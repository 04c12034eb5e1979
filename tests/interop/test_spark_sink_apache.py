"""The Spark sink against Apache RocketMQ: at least once, and said so."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

import pytest

from escrowmq.errors import ConfigError
from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import Record
from tests.interop.remoting import Client
from tests.support.spark_sinks import Query, numbers

pytestmark = [pytest.mark.apache, pytest.mark.slow]

QUEUES = 4


def test_rows_are_written_at_least_once_and_a_warning_says_so(
    version: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ApacheRocketMQ(version, tmp_path) as server, Client(server.address) as client:
        client.create_topic("t", queues=QUEUES)
        query = Query(server.namesrv_address, "t")
        with caplog.at_level(logging.WARNING):
            written = query.task("r1", 0, numbers(0, 100))
        assert "writing at least once" in caplog.text
        assert not written.parked_halves
        query.commit(0, written)
        query.commit(0, query.task("r2", 0, numbers(0, 100)))
        records = _readable(client, 200)
        assert Counter(r.body.decode() for r in records) == Counter(numbers(0, 100) * 2)
        assert len({r.properties["UNIQ_KEY"] for r in records}) == 100
        insisting = Query(server.namesrv_address, "t", guarantee="exactly-once")
        with pytest.raises(ConfigError, match="needs EscrowMQ brokers"):
            insisting.writer()


def _readable(client: Client, count: int) -> list[Record]:
    """What can be read, once it is so much: Apache answers a send before a pull finds it."""
    deadline_s = time.monotonic() + 60
    while True:
        found = [r for queue_id in range(QUEUES) for r in client.pull_all("t", queue_id)]
        if len(found) >= count or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)
