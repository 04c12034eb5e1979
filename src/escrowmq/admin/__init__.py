"""Look at a cluster and change it, without an event loop. RocketMQ's counterpart is MQAdminExt.

The command line is written with this package; programs may use it too.

    Cluster(servers, access) ─── name servers: brokers(), route(topic), topics()
        │
        └─ ask_all(question) ─── for each broker: question(SyncConnection) → values
                                 a broker that cannot answer → Cluster.failures

What always holds: a broker that fails never hides the answers of the others, and is always listed
in `Cluster.failures`. Nothing here prints or asks a user, and nothing here imports the broker or
the store.

Modules in reading order:

    cluster.py        brokers, routes and topics of a cluster; ask all brokers
    queries.py        questions to one broker: topics, groups, lag, runtime figures, settings
    topics.py         create, change and delete topics
    offsets.py        plan and apply a reset of a consumer group
    messages.py       find messages, follow a topic
    dead_letters.py   find, resend, export and purge dead letters
    transactions.py   list, explain and decide transactions
"""

from __future__ import annotations

from escrowmq.admin.cluster import BrokerAddress, BrokerFailure, Cluster
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection

__all__ = ["BrokerAddress", "BrokerFailure", "Cluster", "OutgoingRequest", "SyncConnection"]
