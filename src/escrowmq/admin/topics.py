"""Create, change and delete topics on the brokers of a cluster.

    with Cluster("127.0.0.1:9876") as cluster:
        create_topic(cluster, "orders", queues=8)
        delete_topic(cluster, "orders")

A broker that fails is listed in the failures of the cluster; the others are changed nevertheless.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.queries import NOT_FOUND_CODES
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import EscrowError
from escrowmq.message.topic_config import PERM_READ_WRITE, TopicConfig
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers_admin import CreateTopic, DeleteTopicInNamesrv, TopicHeader

DEFAULT_QUEUES: Final = 4


def create_topic(
    cluster: Cluster,
    topic: str,
    *,
    queues: int = DEFAULT_QUEUES,
    perm: int = PERM_READ_WRITE,
    order: bool = False,
    attributes: str | None = None,
    brokers: Iterable[BrokerAddress] | None = None,
) -> list[BrokerAddress]:
    """Create a topic, or change the one of this name, on these brokers or on all.

    `queues` is their number on each broker; with fewer than before, the messages of the others are
    hidden. `perm` is 4 to read, 2 to write, or 6 for both. `attributes` are RocketMQ's:
    `+name=value` sets one, `-name` removes one, commas separate them. Return the brokers that have
    stored it.
    """
    config = TopicConfig(
        topic_name=topic,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=perm,
        order=order,
    )
    answers = cluster.ask_all(
        lambda connection: write_topic(connection, config, attributes), brokers=brokers
    )
    return [broker for broker, _ in answers]


def write_topic(
    connection: SyncConnection, config: TopicConfig, attributes: str | None = None
) -> None:
    """Create or change a topic on one broker. Raises RequestRefused or TransportError."""
    header = CreateTopic(
        topic=config.topic_name,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
        attributes=attributes,
    )
    connection.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def delete_topic(cluster: Cluster, topic: str) -> list[BrokerAddress]:
    """Delete a topic with its messages and offsets. This cannot be undone.

    Return the brokers that have confirmed it; those that did not have the topic may be among them.
    """
    code, header = RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic=topic)
    deleted = cluster.ask_all(
        lambda connection: connection.call(code, header), ignored_codes=NOT_FOUND_CODES
    )
    # With `broker` the topic stays on other brokers, so the name servers keep its route.
    for address in cluster.servers if cluster.selected_broker is None else ():
        try:
            cluster.connection(address).call(
                RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicInNamesrv(topic=topic)
            )
        except EscrowError as error:
            cluster.report_failure(BrokerAddress(address, address), error)
    return [broker for broker, _ in deleted]
