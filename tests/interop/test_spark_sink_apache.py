"""The Spark sink writes to Apache RocketMQ at least once, and logs a warning about it."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from escrowmq.errors import ConfigError
from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import Record
from tests.interop.releases import with_releases
from tests.interop.remoting import Client
from tests.support.spark_sinks import Query, numbers
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.apache, pytest.mark.slow]

QUEUES = 4


@with_releases("version", in_ci=["4.9.7"])
def test_rows_are_written_at_least_once_with_a_warning(
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
        # Apache responds to a send before a pull returns the message.
        wait_until(lambda: len(stored(client)) >= 200, "200 messages are stored", timeout_s=60)
        records = stored(client)
        assert Counter(record.body.decode() for record in records) == Counter(numbers(0, 100) * 2)
        assert len({record.properties["UNIQ_KEY"] for record in records}) == 100
        exactly_once = Query(server.namesrv_address, "t", guarantee="exactly-once")
        with pytest.raises(ConfigError, match="needs EscrowMQ brokers"):
            exactly_once.writer()


def stored(client: Client) -> list[Record]:
    return [record for queue_id in range(QUEUES) for record in client.pull_all("t", queue_id)]
