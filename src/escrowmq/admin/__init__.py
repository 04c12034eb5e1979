"""Look at a cluster and change it, without an event loop. RocketMQ's counterpart is MQAdminExt.

The command line is written with this package; programs may use it too.

    Cluster(servers, access) ── name servers: brokers, routes, topics
        │
        └─ ask_all(question) ── one SyncConnection per broker ── question(connection) ── values

A broker that cannot be asked is listed in `Cluster.failures`; the others are asked all the same.
Nothing here prints, and nothing here is imported from the broker or the store.

`cluster.py`: brokers, routes and topics of a cluster; ask all brokers.
"""

from __future__ import annotations

from escrowmq.admin.cluster import BrokerAddress, BrokerFailure, Cluster
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection

__all__ = ["BrokerAddress", "BrokerFailure", "Cluster", "OutgoingRequest", "SyncConnection"]
