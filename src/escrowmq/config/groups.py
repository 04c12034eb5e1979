"""The settings themselves, in the groups that parts of the server are given.

A field's name carries its unit. Its `conf` is what RocketMQ's broker.conf calls it, and its unit is
RocketMQ's, so that an operator's file works here as it stands; a name that begins with `escrow` is
ours alone. Defaults are those of RocketMQ 5.5.0, but for the addresses (loopback, until somebody
says otherwise), the broker's name and the directory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from escrowmq.config.kinds import (
    INT_MAX,
    Addresses,
    DelayLevels,
    Directory,
    Host,
    Hours,
    Kind,
    OneOf,
    Whole,
    Word,
    YesNo,
)
from escrowmq.errors import ConfigError

MIB: Final = 1 << 20
FRAME_BYTES_MAX: Final = 16 * MIB  # RocketMQ's; a connection must have room for one
LOOPBACK: Final = "127.0.0.1"
_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


class FlushMode(enum.Enum):
    ASYNC = "ASYNC_FLUSH"
    SYNC = "SYNC_FLUSH"


class MetricsExporter(enum.Enum):
    DISABLE = "DISABLE"
    PROM = "PROM"


class LogLevel(enum.Enum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class BrokerRole(enum.Enum):
    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"


def _setting(default: object, kind: Kind, conf: str, unit: str, what: str) -> Any:
    return field(default=default, metadata={"kind": kind, "conf": conf, "unit": unit, "help": what})


def _yes_no(default: bool, conf: str, what: str) -> Any:
    return _setting(default, YesNo(), conf, "", what)


def _ms(default: int, conf: str, what: str, *, at_least: int = 1) -> Any:
    return _setting(default, Whole(at_least), conf, "ms", what)


class _Group:
    """A frozen dataclass whose values are checked however it was made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every group is a dataclass
            value = getattr(self, item.name)
            try:
                item.metadata["kind"].check(value)
            except ValueError as error:
                raise ConfigError(f"{item.metadata['conf']}={value!r}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(_Group):
    """Who this broker is, what it allows, and where it registers."""

    cluster_name: str = _setting(
        "DefaultCluster", Word(), "brokerClusterName", "", "The cluster this broker belongs to."
    )
    broker_name: str = _setting(
        "broker-a", Word(), "brokerName", "", "The name under which clients know this broker."
    )
    broker_id: int = _setting(
        0, Whole(0, 0), "brokerId", "", "0, which says master; there are no slaves here."
    )
    advertised_address: str = _setting(
        LOOPBACK,
        Host(to_listen=False),
        "brokerIP1",
        "",
        "The address that clients are told; if empty, the machine's own, found at start.",
    )
    namesrv_addresses: tuple[str, ...] = _setting(
        (), Addresses(), "namesrvAddr", "", "The name servers to register with."
    )
    broker_role: BrokerRole = _setting(  # noqa: RUF009  # it is a field()
        BrokerRole.ASYNC_MASTER,
        OneOf(BrokerRole, {"SLAVE": "EscrowMQ has no slaves"}),
        "brokerRole",
        "",
        "Either word says master; there are no replicas to wait for.",
    )
    broker_permission: int = _setting(
        6, Whole(0, 7), "brokerPermission", "", "4 to be read, 2 to be written, 6 for both."
    )
    creates_topics: bool = _yes_no(
        True, "autoCreateTopicEnable", "Whether the first message to a topic creates it."
    )
    topic_queues: int = _setting(
        8,
        Whole(1, 65_535),
        "defaultTopicQueueNums",
        "queues",
        "At most so many in a topic created so.",
    )
    creates_groups: bool = _yes_no(
        True, "autoCreateSubscriptionGroup", "Whether a group's first consumer creates the group."
    )
    has_cluster_topic: bool = _yes_no(
        True, "clusterTopicEnable", "Whether there is a topic with the name of the cluster."
    )
    has_broker_topic: bool = _yes_no(
        True, "brokerTopicEnable", "Whether there is a topic with the name of the broker."
    )
    register_interval_ms: int = _setting(
        30_000,
        Whole(100, 60_000),
        "registerNameServerPeriod",
        "ms",
        "Time between two registrations with the name servers.",
    )
    region_id: str = _setting(
        "DefaultRegion", Word(), "regionId", "", "The region that stored messages are marked with."
    )
    trace_on: bool = _yes_no(True, "traceOn", "Whether clients are told to trace their messages.")
    stores_replies: bool = _yes_no(
        True, "storeReplyMessageEnable", "Whether the answer to a request message is stored too."
    )
    log_level: LogLevel = _setting(  # noqa: RUF009  # it is a field()
        LogLevel.INFO, OneOf(LogLevel), "escrowLogLevel", "", "What is logged: this and worse."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(_Group):
    """Where the server listens, and how much it takes on."""

    bind_address: str = _setting(
        LOOPBACK, Host(to_listen=True), "bindAddress", "", "The address to listen on."
    )
    listen_port: int = _setting(
        10_911, Whole(0, 65_535), "listenPort", "", "The broker's port; 0 takes any free one."
    )
    idle_max_s: int = _setting(
        120,
        Whole(1),
        "serverChannelMaxIdleTimeSeconds",
        "s",
        "A connection that is silent for so long is closed.",
    )
    connections_max: int = _setting(
        10_000,
        Whole(1),
        "escrowConnectionsMax",
        "connections",
        "At most so many; one more is closed at once.",
    )
    in_flight_bytes_max: int = _setting(
        256 * MIB,
        Whole(FRAME_BYTES_MAX),
        "escrowInFlightBytesMax",
        "bytes",
        "Requests and answers in memory; nothing more is read until there is less.",
    )
    connection_in_flight_bytes_max: int = _setting(
        32 * MIB,
        Whole(FRAME_BYTES_MAX),
        "escrowConnectionInFlightBytesMax",
        "bytes",
        "The same for a single connection.",
    )

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.connection_in_flight_bytes_max > self.in_flight_bytes_max:
            raise ConfigError(
                f"escrowConnectionInFlightBytesMax={self.connection_in_flight_bytes_max}: "
                f"must not be more than escrowInFlightBytesMax={self.in_flight_bytes_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(_Group):
    """Where messages are kept, how safely and how long."""

    root_dir: Path = _setting(  # noqa: RUF009  # it is a field()
        Path("escrowmq-data"), Directory(), "storePathRootDir", "", "The directory of the store."
    )
    flush_mode: FlushMode = _setting(  # noqa: RUF009  # it is a field()
        FlushMode.ASYNC,
        OneOf(FlushMode),
        "flushDiskType",
        "",
        "Whether a send is answered before or after its message is safe from a power cut.",
    )
    sync_flush_timeout_ms: int = _ms(
        5_000, "syncFlushTimeout", "A send under SYNC_FLUSH waits so long for its flush."
    )
    flush_interval_ms: int = _ms(
        500, "flushIntervalCommitLog", "Time between two flushes under ASYNC_FLUSH."
    )
    checkpoint_interval_ms: int = _ms(
        1_000, "escrowCheckpointInterval", "Time between two checkpoints of queues and index."
    )
    segment_bytes: int = _setting(
        1 << 30, Whole(4096), "mappedFileSizeCommitLog", "bytes", "The size of a log file."
    )
    queue_file_bytes: int = _setting(
        6_000_000,
        Whole(20, INT_MAX // 20 * 20, multiple_of=20),
        "mappedFileSizeConsumeQueue",
        "bytes",
        "The size of a queue file, 20 for each message; rounded up to a multiple of that.",
    )
    index_enabled: bool = _yes_no(
        True, "messageIndexEnable", "Whether new messages can be found by their keys."
    )
    index_slots: int = _setting(
        5_000_000, Whole(1), "maxHashSlotNum", "slots", "Hash slots of an index file."
    )
    index_entries: int = _setting(
        20_000_000, Whole(2), "maxIndexNum", "keys", "Keys that an index file has room for."
    )
    message_bytes_max: int = _setting(
        4 * MIB, Whole(1), "maxMessageSize", "bytes", "The longest body that is taken."
    )
    sealed: bool = _yes_no(
        False, "enabledAppendPropCRC", "Whether a record carries a checksum of all of it."
    )
    reserved_hours: int = _setting(
        72, Whole(1), "fileReservedTime", "hours", "A log file is kept for so long."
    )
    delete_hours: tuple[int, ...] = _setting(
        (4,), Hours(), "deleteWhen", "", "The hours of the day at which old files go."
    )
    expire_percent: int = _setting(
        75,
        Whole(1, 100),
        "diskMaxUsedSpaceRatio",
        "percent",
        "A disk fuller than this loses its old files at any hour.",
    )
    force_expire_percent: int = _setting(
        85,
        Whole(1, 100),
        "diskSpaceCleanForciblyRatio",
        "percent",
        "A disk fuller than this loses its oldest files, whatever their age.",
    )
    refuse_percent: int = _setting(
        90,
        Whole(1, 100),
        "diskSpaceWarningLevelRatio",
        "percent",
        "A disk fuller than this takes no more messages.",
    )
    expire_interval_ms: int = _ms(
        10_000, "cleanResourceInterval", "Time between two looks for files to delete."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeConfig(_Group):
    """What one pull brings, and how long it may wait."""

    long_polling: bool = _yes_no(
        True, "longPollingEnable", "Whether a pull waits as long as its consumer allows."
    )
    short_poll_ms: int = _ms(
        1_000,
        "shortPollingTimeMills",
        "A pull waits so long if longPollingEnable is false.",
        at_least=0,
    )
    pull_messages_max: int = _setting(
        32, Whole(1), "maxTransferCountOnMessageInMemory", "messages", "At most so many in a pull."
    )
    pull_bytes_max: int = _setting(
        262_144,
        Whole(1),
        "maxTransferBytesOnMessageInMemory",
        "bytes",
        "At most so much in a pull; a longer message comes alone.",
    )
    waiting_pulls_max: int = _setting(
        100_000,
        Whole(0),
        "escrowWaitingPullsMax",
        "pulls",
        "At most so many wait; one more is answered at once.",
    )
    offsets_interval_ms: int = _ms(
        5_000, "flushConsumerOffsetInterval", "Time between two writes of the consumers' offsets."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(_Group):
    """Messages that are delivered later."""

    delay_levels_ms: tuple[int, ...] = _setting(
        DelayLevels().parse(_DELAY_LEVELS),
        DelayLevels(),
        "messageDelayLevel",
        "",
        "The delays that a message may choose from, level 1 first.",
    )
    delay_offsets_interval_ms: int = _ms(
        10_000, "flushDelayOffsetInterval", "Time between two writes of how far each level is."
    )
    timer_enabled: bool = _yes_no(
        True, "timerWheelEnable", "Whether a message may name any time of delivery."
    )
    timer_delay_max_s: int = _setting(
        259_200, Whole(1), "timerMaxDelaySec", "s", "The farthest such time from now."
    )
    timer_precision_ms: int = _setting(
        1_000, Whole(1, 60_000), "timerPrecisionMs", "ms", "A message may be late by this much."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvConfig(_Group):
    """The name server; it listens on the broker's bindAddress."""

    namesrv_port: int = _setting(
        9_876,
        Whole(0, 65_535),
        "escrowNamesrvPort",
        "",
        "The name server's port; 0 takes any free one.",
    )
    broker_scan_interval_ms: int = _ms(
        5_000, "scanNotActiveBrokerInterval", "Time between two looks for brokers that are gone."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(_Group):
    """Figures for Prometheus over HTTP."""

    metrics_exporter: MetricsExporter = _setting(  # noqa: RUF009  # it is a field()
        MetricsExporter.DISABLE,
        OneOf(MetricsExporter, dict.fromkeys(("OTLP_GRPC", "LOG"), "only Prometheus is served")),
        "metricsExporterType",
        "",
        "Whether metrics are served.",
    )
    metrics_port: int = _setting(
        5_557, Whole(0, 65_535), "metricsPromExporterPort", "", "The port for that; 0 is none."
    )
    metrics_address: str = _setting(
        "",
        Host(to_listen=True, or_empty=True),
        "metricsPromExporterHost",
        "",
        "The address for that; if empty, bindAddress.",
    )

    @property
    def is_on(self) -> bool:
        return self.metrics_exporter is MetricsExporter.PROM and self.metrics_port > 0
