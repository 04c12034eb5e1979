"""`escrowmq.admin.topics` creates, changes and deletes topics on real brokers."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.admin import Cluster
from escrowmq.admin.queries import topic_configs
from escrowmq.admin.topics import create_topic, delete_topic
from escrowmq.message.topic_config import TopicConfig
from tests.support.brokers import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def test_a_topic_is_created_changed_and_deleted_on_every_broker(tmp_path: Path) -> None:
    with Server(tmp_path / "a") as first:
        conf = {"brokerName": "broker-b", "namesrvAddr": first.namesrv_address}
        with (
            Server(tmp_path / "b", role="broker", conf=conf),
            Cluster(first.namesrv_address) as cluster,
        ):
            wait_until(lambda: len(cluster.brokers(fresh=True)) == 2, "both brokers are registered")

            def configs() -> list[TopicConfig | None]:
                return [table.get("orders") for _, table in cluster.ask_all(topic_configs)]

            created = create_topic(cluster, "orders", queues=2, order=True)
            assert [broker.name for broker in created] == ["broker-a", "broker-b"]
            assert [config and (config.read_queue_nums, config.order) for config in configs()] == [
                (2, True)
            ] * 2
            create_topic(cluster, "orders", queues=8, perm=4, brokers=[created[1]])
            assert [config and (config.write_queue_nums, config.perm) for config in configs()] == [
                (2, 6),
                (8, 4),
            ]
            assert delete_topic(cluster, "orders") == created
            assert configs() == [None, None]
            assert cluster.failures == []
