"""Metrics of the parts around the broker: ports, flushes, disk, process; and the health."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from escrowmq.broker.broker import Broker
from escrowmq.broker.metrics import (
    STORAGE_LABELS,
    BrokerMetrics,
    TransactionMetrics,
    response_code_name,
)
from escrowmq.clock import Clock
from escrowmq.config import Config
from escrowmq.metrics import Collector, Counter, Family, Gauge, Histogram, Labels, Registry
from escrowmq.server.remoting_server import RemotingServer
from escrowmq.server.security import AccessControl
from escrowmq.server.tasks import GroupCommit, StoreMaintenance
from escrowmq.store.disk import Disk

_STATM: Final = Path("/proc/self/statm")


class Health:
    """Whether clients should connect to this server."""

    def __init__(self) -> None:
        self.reason: str | None = "starting"  # set while the whole process is not ready
        self._checks: list[Callable[[], str | None]] = []

    def add(self, check: Callable[[], str | None]) -> None:
        """Add a function that returns why its part is not ready, or None."""
        self._checks.append(check)

    def not_ready_reason(self) -> str | None:
        if self.reason is not None:
            return self.reason
        return next((reason for check in self._checks if (reason := check())), None)


def new_registry(config: Config, role: str) -> Registry:
    """Return a registry with RocketMQ's common labels and the metrics of the process."""
    registry = Registry(
        {
            "cluster": config.broker.cluster_name,
            "node_type": "nameserver" if role == "namesrv" else "broker",
            "node_id": config.broker.broker_name,
        }
    )
    registry.add(process_metrics)
    return registry


def add_broker_metrics(
    registry: Registry, config: Config, clock: Clock, broker: Broker, server: RemotingServer
) -> None:
    permission = config.broker.broker_permission
    registry.add(BrokerMetrics(broker, clock.now_ms, permission=permission).collect)
    transactions = broker.transactions
    transaction_metrics = TransactionMetrics(
        transactions.coordinator, transactions.checker, clock.now_ms
    )
    registry.add(transaction_metrics.collect)
    registry.add(remoting_metrics(server, "broker"))


def remoting_metrics(server: RemotingServer, name: str) -> Collector:
    """Return the collector of a port. `name` is its label: "broker" or "namesrv"."""
    labels: Labels = {"port": name}

    def collect() -> Iterator[Family]:
        yield Gauge(
            "escrowmq_connections", "Open connections.", [(labels, len(server.connections))]
        )
        yield Counter(
            "escrowmq_refused_connections_total",
            "Connections that were closed at once because there were too many.",
            [(labels, server.refused_connections)],
        )
        yield Counter(
            "escrowmq_refused_handshakes_total",
            "Connections that were closed because of missing TLS or a failed handshake.",
            [(labels, server.refused_handshakes())],
        )
        yield Gauge(
            "escrowmq_partial_bytes",
            "Bytes of requests that are not complete yet.",
            [(labels, server.partial_bytes)],
        )
        yield Counter(
            "escrowmq_dropped_partial_total",
            "Connections that were closed because of an incomplete request.",
            [(labels, server.dropped_partial_requests)],
        )
        yield Gauge(
            "escrowmq_unsent_bytes",
            "Bytes of responses that clients have not read yet.",
            [(labels, server.unsent_bytes())],
        )
        yield Counter(
            "escrowmq_unreadable_requests_total",
            "Requests that were refused because they are malformed or unknown.",
            [
                ({**labels, "response_code": response_code_name(code)}, count)
                for code, count in sorted(server.refused_requests.items())
            ],
        )
        yield Histogram(
            "escrowmq_turn_seconds",
            "Duration of a turn, from the first bytes received to the last response written.",
            [(labels, server.turn_seconds)],
        )

    return collect


def store_metrics(
    disk: Disk, group_commit: GroupCommit, maintenance: StoreMaintenance
) -> Collector:
    """Return the collector of flushes, checkpoints and the disk."""

    def collect() -> Iterator[Family]:
        usage = disk.usage()
        used = usage.total_bytes - usage.free_bytes
        yield Gauge(
            "rocketmq_storage_size",
            "Bytes used on the disk of the store.",
            [(STORAGE_LABELS, used)],
        )
        yield Gauge(
            "escrowmq_disk_free_bytes",
            "Bytes free on the disk of the store.",
            [(STORAGE_LABELS, usage.free_bytes)],
        )
        yield Gauge(
            "escrowmq_flush_waiting",
            "Turns whose responses wait for a flush.",
            [({}, group_commit.waiting_count)],
        )
        yield Histogram(
            "escrowmq_flush_seconds",
            "Duration of a flush of the log, for waiting requests or at the interval.",
            [
                ({"why": "waited"}, group_commit.flush_seconds),
                ({"why": "time"}, maintenance.flush_seconds),
            ],
        )
        yield Histogram(
            "escrowmq_checkpoint_seconds",
            "Duration of a checkpoint; messages are sent and received meanwhile.",
            [({}, maintenance.checkpoint_seconds)],
        )

    return collect


def access_metrics(access: AccessControl) -> Collector:
    """Return the collector of the files of accounts and certificates."""

    def collect() -> Iterator[Family]:
        yield Gauge(
            "escrowmq_access_files_broken",
            "Files of accounts or certificates that are invalid; the old content is used.",
            [({}, sum(watcher.is_broken for watcher in access.watchers))],
        )

    return collect


def process_metrics() -> Iterator[Family]:
    """Collect processor time and memory, under the names that Prometheus clients use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield Counter(
        "process_cpu_seconds_total",
        "Processor time of this process.",
        [({}, round(usage.ru_utime + usage.ru_stime, 6))],
    )
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return  # there is no /proc on this system
    yield Gauge(
        "process_resident_memory_bytes",
        "Memory of this process, including mapped pages of the log.",
        [({}, pages * os.sysconf("SC_PAGE_SIZE"))],
    )
