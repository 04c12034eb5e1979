"""Metrics of the parts around the broker: ports, flushes, disk, process; and the health."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from escrowmq.broker.broker import Broker
from escrowmq.broker.metrics import (
    STORAGE,
    STORAGE_LABELS,
    BrokerMetrics,
    TransactionMetrics,
    response_code_name,
)
from escrowmq.client_memory import MemoryUse
from escrowmq.clock import Clock
from escrowmq.config import Config
from escrowmq.metrics import Collector, Counter, Gauge, Histogram, Registry, Samples
from escrowmq.server.connection_limits import MemoryWatermark
from escrowmq.server.remoting_server import RemotingServer
from escrowmq.server.security import AccessControl
from escrowmq.server.tasks import GroupCommit, StoreMaintenance
from escrowmq.store.disk import Disk

_STATM: Final = Path("/proc/self/statm")

CONNECTIONS: Final = Gauge(
    "escrowmq_connections", "Open connections. The port is broker or namesrv.", ("port",)
)
REFUSED_CONNECTIONS: Final = Counter(
    "escrowmq_refused_connections_total",
    "Connections that were closed at once because of escrowConnectionsMax.",
    ("port",),
)
REFUSED_HANDSHAKES: Final = Counter(
    "escrowmq_refused_handshakes_total",
    "Connections that were closed because TLS was missing, or its handshake failed or timed out.",
    ("port",),
)
PARTIAL_BYTES: Final = Gauge(
    "escrowmq_partial_bytes", "Bytes of requests that are not complete yet.", ("port",)
)
DROPPED_PARTIAL: Final = Counter(
    "escrowmq_dropped_partial_total",
    "Connections that were closed because a request was incomplete for too long, or incomplete "
    "requests took too much memory.",
    ("port",),
)
UNSENT_BYTES: Final = Gauge(
    "escrowmq_unsent_bytes", "Bytes of responses that clients have not read yet.", ("port",)
)
CLIENT_MEMORY: Final = Gauge(
    "escrowmq_client_memory_bytes",
    "Memory that clients make the server keep, by what it is kept for.",
    ("use",),
)
CLIENT_MEMORY_LIMIT: Final = Gauge(
    "escrowmq_client_memory_limit_bytes",
    "Limit of escrowmq_client_memory_bytes. Above soft, the greediest connections get no more; "
    "above hard, they are closed.",
    ("limit",),
)
CLIENT_MEMORY_REFUSED: Final = Counter(
    "escrowmq_client_memory_refused_total",
    "Requests that were refused because of the memory that is kept for their connection.",
)
HELD_CONNECTIONS: Final = Gauge(
    "escrowmq_held_connections",
    "Connections that are not read from, because the server keeps too much for them.",
)
GREEDY_CONNECTIONS_CLOSED: Final = Counter(
    "escrowmq_greedy_connections_closed_total",
    "Connections that were closed because escrowClientMemoryMax was exceeded.",
)
UNREADABLE_REQUESTS: Final = Counter(
    "escrowmq_unreadable_requests_total",
    "Requests that were refused because they are malformed or unknown.",
    ("port", "response_code"),
)
TURN_SECONDS: Final = Histogram(
    "escrowmq_turn_seconds",
    "Duration of a turn, from the first bytes received to the last response written.",
    ("port",),
)
DISK_USED: Final = Gauge(
    "rocketmq_storage_size",
    "Bytes used on the disk of the store, also by other programs.",
    STORAGE_LABELS,
)
DISK_FREE: Final = Gauge(
    "escrowmq_disk_free_bytes", "Bytes free on the disk of the store.", STORAGE_LABELS
)
FLUSH_WAITING: Final = Gauge("escrowmq_flush_waiting", "Turns whose responses wait for a flush.")
FLUSH_SECONDS: Final = Histogram(
    "escrowmq_flush_seconds",
    "Duration of a flush of the log. The label why is waited if a response waits for it, and time "
    "if flushIntervalCommitLog has passed.",
    ("why",),
)
CHECKPOINT_SECONDS: Final = Histogram(
    "escrowmq_checkpoint_seconds",
    "Duration of a checkpoint; messages are sent and received meanwhile.",
)
CLOCK_OFFSET: Final = Gauge(
    "escrowmq_clock_offset_seconds",
    "How far the wall clock is ahead of the broker's clock, which does not jump. It is near 0 "
    "unless the wall clock was set.",
)
CLOCK_JUMPS: Final = Counter(
    "escrowmq_clock_jumps_total",
    "How often the wall clock was set by more than two seconds since the start, or before it.",
)
STORED_AHEAD: Final = Gauge(
    "escrowmq_stored_ahead_seconds",
    "How far the newest message was stored in the future. Above 0, the clock was wrong when it "
    "was stored, or is wrong now.",
)
BROKEN_FILES: Final = Gauge(
    "escrowmq_access_files_broken",
    "Files of accounts or certificates that changed and are invalid; the old content is used.",
)
PROCESSOR_SECONDS: Final = Counter("process_cpu_seconds_total", "Processor time of this process.")
RESIDENT_MEMORY: Final = Gauge("process_resident_memory_bytes", "Memory of this process.")


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
    registry: Registry,
    config: Config,
    wall: Clock,
    steady: Clock,
    broker: Broker,
    server: RemotingServer,
) -> None:
    """Add the metrics of a broker. Stored times are compared with `wall`, its own with `steady`."""
    permission = config.broker.broker_permission
    registry.add(BrokerMetrics(broker, wall.now_ms, permission=permission).collect)
    transactions = broker.transactions
    transaction_metrics = TransactionMetrics(
        transactions.coordinator, transactions.checker, steady.now_ms
    )
    registry.add(transaction_metrics.collect)
    registry.add(remoting_metrics(server, "broker"))


def remoting_metrics(server: RemotingServer, port: str) -> Collector:
    """Return the collector of a port, which is labelled "broker" or "namesrv"."""

    def collect() -> Iterator[Samples]:
        yield CONNECTIONS.value(len(server.connections), port)
        yield REFUSED_CONNECTIONS.value(server.refused_connections, port)
        yield REFUSED_HANDSHAKES.value(server.refused_handshakes(), port)
        yield PARTIAL_BYTES.value(server.partial_bytes, port)
        yield DROPPED_PARTIAL.value(server.dropped_partial_requests, port)
        yield UNSENT_BYTES.value(server.unsent_bytes(), port)
        yield UNREADABLE_REQUESTS.samples(
            ((port, response_code_name(code)), count)
            for code, count in sorted(server.refused_requests.items())
        )
        yield TURN_SECONDS.value(server.turn_seconds, port)

    return collect


def client_memory_metrics(watermark: MemoryWatermark) -> Collector:
    """Return the collector of the memory that clients make the server keep."""

    def collect() -> Iterator[Samples]:
        memory = watermark.memory
        yield CLIENT_MEMORY.samples(((use.label,), memory.bytes_for(use)) for use in MemoryUse)
        yield CLIENT_MEMORY_LIMIT.samples(
            [(("soft",), memory.limits.soft_max), (("hard",), memory.limits.hard_max)]
        )
        yield CLIENT_MEMORY_REFUSED.value(memory.refused)
        yield HELD_CONNECTIONS.value(watermark.held_count)
        yield GREEDY_CONNECTIONS_CLOSED.value(watermark.closed_connections)

    return collect


def store_metrics(
    disk: Disk, group_commit: GroupCommit, maintenance: StoreMaintenance
) -> Collector:
    """Return the collector of flushes, checkpoints and the disk."""

    def collect() -> Iterator[Samples]:
        usage = disk.usage()
        yield DISK_USED.value(usage.total_bytes - usage.free_bytes, *STORAGE)
        yield DISK_FREE.value(usage.free_bytes, *STORAGE)
        yield FLUSH_WAITING.value(group_commit.waiting_count)
        yield FLUSH_SECONDS.samples(
            [(("waited",), group_commit.flush_seconds), (("time",), maintenance.flush_seconds)]
        )
        yield CHECKPOINT_SECONDS.value(maintenance.checkpoint_seconds)
        yield CLOCK_OFFSET.value(maintenance.jump_detector.offset_ms / 1000)
        yield CLOCK_JUMPS.value(maintenance.jump_detector.jumps)
        yield STORED_AHEAD.value(maintenance.stored_ahead_ms() / 1000)

    return collect


def access_metrics(access: AccessControl) -> Collector:
    """Return the collector of the files of accounts and certificates."""

    def collect() -> Iterator[Samples]:
        yield BROKEN_FILES.value(sum(watcher.is_broken for watcher in access.watchers))

    return collect


def process_metrics() -> Iterator[Samples]:
    """Collect processor time and memory, under the names that Prometheus clients use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield PROCESSOR_SECONDS.value(round(usage.ru_utime + usage.ru_stime, 6))
    try:
        pages = int(_STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return  # there is no /proc on this system
    yield RESIDENT_MEMORY.value(pages * os.sysconf("SC_PAGE_SIZE"))
