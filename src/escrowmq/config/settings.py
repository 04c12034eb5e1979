"""Every setting of the server, declared once, in groups: one for each part of the server.

A field declares the default, the allowed values, RocketMQ's key, the unit, a sentence for users and
whether the setting can change while the server runs. Files, environment, flags, `escrowmq config`
and the tables in docs/configuration.md all read these declarations. Values that follow from
settings, such as seconds and ratios, are properties of the group.

Keys and units are those of RocketMQ's broker.conf, so that an existing file works as it is; a key
that begins with `escrow` exists only here. The keys with dots are system properties in RocketMQ,
which reads them from its command line or from tls.properties. Field names, which carry the unit,
are also keys in TOML files. Defaults are those of RocketMQ 5.5.0, except for the addresses
(loopback), the broker's name and the directory.
"""

# ruff: noqa: RUF009  (setting() returns a dataclass field, which is a valid default)

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from escrowmq.config.setting_types import (
    INT_MAX,
    AddressList,
    Boolean,
    Choice,
    CredentialsText,
    DelayLevels,
    DirectoryPath,
    HostAddress,
    HoursOfDay,
    NumberPerName,
    OptionalFile,
    PrintableName,
    SecretText,
    SettingType,
    WholeNumber,
)
from escrowmq.errors import ConfigError
from escrowmq.secret import Secret

MIB: Final = 1 << 20
FRAME_BYTES_MAX: Final = 16 * MIB  # the largest request of RocketMQ; every buffer must hold one
LOOPBACK: Final = "127.0.0.1"

_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_PERM_WRITE: Final = 2  # a bit of brokerPermission
_HOUR_MS: Final = 3_600_000
_TICK_MS: Final = 100  # how often the broker looks for due work, unless timers must be finer
_BLANK_RECORD_BYTES: Final = 8  # the record that ends a segment
_CHECK_INTERVAL_MAX_MS: Final = _HOUR_MS


def setting(
    default: object,
    setting_type: SettingType,
    key: str,
    unit: str,
    help_text: str,
    *,
    live: bool = False,
) -> Any:
    """Declare a setting as a field of its group.

    `key` is its name in RocketMQ's files, `unit` what the value counts ("" if nothing), and
    `help_text` one sentence for users. A `live` setting takes effect without a restart; the part
    that uses it must then follow `LiveConfig`.
    """
    metadata = {"type": setting_type, "key": key, "unit": unit, "help": help_text, "is_live": live}
    return field(default=default, metadata=metadata)


class _SettingsGroup:
    """Base of the groups: a frozen dataclass that checks its values, also in `replace()`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every group is a dataclass
            if not item.init:
                continue  # a derived value
            value = getattr(self, item.name)
            try:
                item.metadata["type"].check(value)
            except ValueError as error:
                raise ConfigError(f"{item.metadata['key']}={value!r}: {error}") from None


# One declaration takes two lines inside its parentheses: the values and the sentence for users.
# fmt: off

# --- broker --------------------------------------------------------------------------------------


class BrokerRole(enum.Enum):
    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig(_SettingsGroup):
    """Name and address of this broker, its topics and groups, its registration."""

    cluster_name: str = setting(
        "DefaultCluster", PrintableName(), "brokerClusterName", "",
        "Name of the cluster that this broker belongs to.",
    )
    broker_name: str = setting(
        "broker-a", PrintableName(), "brokerName", "",
        "Name of this broker in routes and logs.",
    )
    broker_id: int = setting(
        0, WholeNumber(0, 0), "brokerId", "",
        "Always 0, which means master: there are no slaves.",
    )
    advertised_address: str = setting(
        LOOPBACK, HostAddress(is_listen_address=False), "brokerIP1", "",
        "Address that clients connect to; if empty, an address of this machine.",
    )
    namesrv_addresses: tuple[str, ...] = setting(
        (), AddressList(), "namesrvAddr", "",
        "Name servers to register with.",
    )
    broker_role: BrokerRole = setting(
        BrokerRole.ASYNC_MASTER, Choice(BrokerRole, {"SLAVE": "EscrowMQ has no slaves"}),
        "brokerRole", "",
        "Both values mean master; there are no replicas to wait for.",
    )
    broker_permission: int = setting(
        6, WholeNumber(0, 7), "brokerPermission", "",
        "What clients may do: 4 read, 2 write, 6 both.", live=True,
    )
    creates_topics: bool = setting(
        True, Boolean(), "autoCreateTopicEnable", "",
        "Create a topic when the first message is sent to it.", live=True,
    )
    auto_topics_max: int = setting(
        10_000, WholeNumber(0), "escrowAutoTopicsMax", "topics",
        "With this many topics, none is created automatically; administrators still can.",
        live=True,
    )
    topic_queues: int = setting(
        8, WholeNumber(1, 65_535), "defaultTopicQueueNums", "queues",
        "Maximum number of queues of a topic that is created automatically.",
    )
    creates_groups: bool = setting(
        True, Boolean(), "autoCreateSubscriptionGroup", "",
        "Create a consumer group when its first consumer connects.", live=True,
    )
    auto_groups_max: int = setting(
        10_000, WholeNumber(0), "escrowAutoGroupsMax", "groups",
        "With this many consumer groups, none is created automatically.", live=True,
    )
    has_cluster_topic: bool = setting(
        True, Boolean(), "clusterTopicEnable", "",
        "Create a topic with the name of the cluster.",
    )
    has_broker_topic: bool = setting(
        True, Boolean(), "brokerTopicEnable", "",
        "Create a topic with the name of the broker.",
    )
    register_interval_ms: int = setting(
        30_000, WholeNumber(100, 60_000), "registerNameServerPeriod", "ms",
        "Time between two registrations with the name servers.",
    )
    region_id: str = setting(
        "DefaultRegion", PrintableName(), "regionId", "",
        "Region that is written into the properties of stored messages.",
    )
    trace_on: bool = setting(
        True, Boolean(), "traceOn", "",
        "Tell clients to send traces of their messages.",
    )
    native_enabled: bool = setting(
        True, Boolean(), "escrowNativeEnable", "",
        "Whether plain requests take the native path, if the native module is installed.",
    )
    has_trace_topic: bool = setting(
        False, Boolean(), "traceTopicEnable", "",
        "Create the topic for traces. Without it, a client's first trace creates the topic, if "
        "topics are created automatically.",
    )
    trace_topic: str = setting(
        "RMQ_SYS_TRACE_TOPIC", PrintableName(), "msgTraceTopicName", "",
        "Name of the topic for traces that traceTopicEnable creates.",
    )
    stores_replies: bool = setting(
        True, Boolean(), "storeReplyMessageEnable", "",
        "Store the reply to a request message as well as forward it.",
    )

    @property
    def is_writable(self) -> bool:
        return bool(self.broker_permission & _PERM_WRITE)

    @property
    def register_interval_s(self) -> float:
        return self.register_interval_ms / 1000


# --- network -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(_SettingsGroup):
    """Address to listen on, limits on connections and their memory."""

    bind_address: str = setting(
        LOOPBACK, HostAddress(is_listen_address=True), "bindAddress", "",
        "Address to listen on.",
    )
    listen_port: int = setting(
        10_911, WholeNumber(0, 65_535), "listenPort", "",
        "Port of the broker; 0 takes any free port.",
    )
    idle_max_s: int = setting(
        120, WholeNumber(1), "serverChannelMaxIdleTimeSeconds", "s",
        "Close a connection on which nothing is received for this long.",
    )
    connections_max: int = setting(
        10_000, WholeNumber(1), "escrowConnectionsMax", "connections",
        "Maximum number of connections; further ones are closed at once.", live=True,
    )
    in_flight_bytes_max: int = setting(
        256 * MIB, WholeNumber(FRAME_BYTES_MAX), "escrowInFlightBytesMax", "bytes",
        "Memory for requests and responses; above it, reading from clients pauses.", live=True,
    )
    connection_in_flight_bytes_max: int = setting(
        32 * MIB, WholeNumber(FRAME_BYTES_MAX), "escrowConnectionInFlightBytesMax", "bytes",
        "Memory that one connection may make the server keep: requests, responses, held pulls, "
        "members of groups. Above it, reading from it pauses, and it cannot add to the others.",
        live=True,
    )
    client_memory_max: int = setting(
        0, WholeNumber(0, 1 << 40), "escrowClientMemoryMax", "bytes",
        "Memory that all clients together may make the server keep. Above three quarters of it, "
        "the greediest connections get no more; above it, they are closed. 0 means a quarter of "
        "the memory of the machine or container.", live=True,
    )
    busy_polls_max: int = setting(
        32, WholeNumber(0, 10_000), "escrowBusyPollsMax", "polls",
        "How often to look for the next request before the event loop sleeps after a turn, as long "
        "as requests are found in this way. Thirty take less than 0.1 ms; 0 saves them.",
    )

    def __post_init__(self) -> None:
        _SettingsGroup.__post_init__(self)
        if self.connection_in_flight_bytes_max > self.in_flight_bytes_max:
            raise ConfigError(
                f"escrowConnectionInFlightBytesMax={self.connection_in_flight_bytes_max}: "
                f"must not be more than escrowInFlightBytesMax={self.in_flight_bytes_max}"
            )


# --- store ---------------------------------------------------------------------------------------


class FlushMode(enum.Enum):
    ASYNC = "ASYNC_FLUSH"
    SYNC = "SYNC_FLUSH"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(_SettingsGroup):
    """Directory of the messages, file sizes, durability and retention."""

    root_dir: Path = setting(
        Path("escrowmq-data"), DirectoryPath(), "storePathRootDir", "",
        "Directory of the store.",
    )
    flush_mode: FlushMode = setting(
        FlushMode.ASYNC, Choice(FlushMode), "flushDiskType", "",
        "SYNC_FLUSH answers a send only after its message is flushed to disk.",
    )
    sync_flush_timeout_ms: int = setting(
        5_000, WholeNumber(1), "syncFlushTimeout", "ms",
        "How long a send waits for the flush under SYNC_FLUSH.",
    )
    flush_interval_ms: int = setting(
        500, WholeNumber(1), "flushIntervalCommitLog", "ms",
        "Time between two flushes of the commit log under ASYNC_FLUSH.",
    )
    checkpoint_interval_ms: int = setting(
        1_000, WholeNumber(1), "escrowCheckpointInterval", "ms",
        "Time between two checkpoints of the consume queues and the index.",
    )
    segment_bytes: int = setting(
        1 << 30, WholeNumber(4096), "mappedFileSizeCommitLog", "bytes",
        "Size of a segment of the commit log.",
    )
    queue_file_bytes: int = setting(
        6_000_000, WholeNumber(20, INT_MAX // 20 * 20, multiple_of=20),
        "mappedFileSizeConsumeQueue", "bytes",
        "Size of a consume queue file, 20 bytes per message; rounded up to a multiple of 20.",
    )
    index_enabled: bool = setting(
        True, Boolean(), "messageIndexEnable", "",
        "Index new messages by their keys.",
    )
    index_slots: int = setting(
        5_000_000, WholeNumber(1), "maxHashSlotNum", "slots",
        "Number of slots of an index file.",
    )
    index_entries: int = setting(
        20_000_000, WholeNumber(2), "maxIndexNum", "keys",
        "Number of keys of an index file.",
    )
    message_bytes_max: int = setting(
        4 * MIB, WholeNumber(1), "maxMessageSize", "bytes",
        "Maximum size of a message body.", live=True,
    )
    sealed: bool = setting(
        True, Boolean(), "enabledAppendPropCRC", "",
        "Add a CRC over the whole record to every stored message, 20 bytes.",
    )
    reserved_hours: int = setting(
        72, WholeNumber(1), "fileReservedTime", "hours",
        "How long a segment of the commit log is retained.", live=True,
    )
    delete_hours: tuple[int, ...] = setting(
        (4,), HoursOfDay(), "deleteWhen", "",
        "Hours of the day at which expired segments are deleted.", live=True,
    )
    expire_percent: int = setting(
        75, WholeNumber(1, 100), "diskMaxUsedSpaceRatio", "percent",
        "Above this disk usage, expired segments are deleted at any time of day.", live=True,
    )
    force_expire_percent: int = setting(
        85, WholeNumber(1, 100), "diskSpaceCleanForciblyRatio", "percent",
        "Above this disk usage, the oldest segments are deleted even if they are not expired.",
        live=True,
    )
    refuse_percent: int = setting(
        90, WholeNumber(1, 100), "diskSpaceWarningLevelRatio", "percent",
        "Above this disk usage, new messages are refused.", live=True,
    )
    expire_interval_ms: int = setting(
        10_000, WholeNumber(1), "cleanResourceInterval", "ms",
        "Time between two searches for segments to delete.",
    )

    @property
    def record_bytes_max(self) -> int:
        """Size limit of a whole record: it is stored in one segment.

        maxMessageSize limits what clients send. The broker stores messages again (commits, delays,
        retries), and must be able to do so after maxMessageSize was lowered.
        """
        return self.segment_bytes - _BLANK_RECORD_BYTES

    @property
    def retention_ms(self) -> int:
        return self.reserved_hours * _HOUR_MS

    @property
    def expire_ratio(self) -> float:
        return self.expire_percent / 100

    @property
    def force_expire_ratio(self) -> float:
        return self.force_expire_percent / 100

    @property
    def refuse_ratio(self) -> float:
        return self.refuse_percent / 100

    @property
    def sync_flush_timeout_s(self) -> float:
        return self.sync_flush_timeout_ms / 1000

    @property
    def flush_interval_s(self) -> float:
        return self.flush_interval_ms / 1000

    @property
    def checkpoint_interval_s(self) -> float:
        return self.checkpoint_interval_ms / 1000

    @property
    def expire_interval_s(self) -> float:
        return self.expire_interval_ms / 1000


# --- consumers and delayed messages --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeConfig(_SettingsGroup):
    """Size of a pull, long polling, filters, consumer offsets."""

    long_polling: bool = setting(
        True, Boolean(), "longPollingEnable", "",
        "If a pull finds no message, hold it for as long as the consumer allows.", live=True,
    )
    short_poll_ms: int = setting(
        1_000, WholeNumber(0), "shortPollingTimeMills", "ms",
        "How long a pull that finds no message is held if longPollingEnable is false.", live=True,
    )
    filters_by_sql: bool = setting(
        False, Boolean(), "enablePropertyFilter", "",
        "Allow consumers to filter messages by SQL92 expressions.", live=True,
    )
    pull_messages_max: int = setting(
        32, WholeNumber(1), "maxTransferCountOnMessageInMemory", "messages",
        "Maximum number of messages in the response to a pull.", live=True,
    )
    # Clients refuse a frame of more than FRAME_BYTES_MAX.
    pull_bytes_max: int = setting(
        262_144, WholeNumber(1, FRAME_BYTES_MAX // 2), "maxTransferBytesOnMessageInMemory", "bytes",
        "Maximum size of the response to a pull; a larger message is sent alone.", live=True,
    )
    waiting_pulls_max: int = setting(
        100_000, WholeNumber(0), "escrowWaitingPullsMax", "pulls",
        "Maximum number of held pulls; further ones are answered at once.",
    )
    offsets_max: int = setting(
        200_000, WholeNumber(0), "escrowOffsetsMax", "offsets",
        "With this many offsets of groups and queues, no further ones are stored.", live=True,
    )
    offsets_interval_ms: int = setting(
        5_000, WholeNumber(1), "flushConsumerOffsetInterval", "ms",
        "Time between two writes of the consumer offsets to disk.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(_SettingsGroup):
    """Messages that are delivered later than they are sent."""

    delay_levels_ms: tuple[int, ...] = setting(
        DelayLevels().parse(_DELAY_LEVELS), DelayLevels(), "messageDelayLevel", "",
        "Delays that a message can choose by level; the first is level 1.",
    )
    delay_offsets_interval_ms: int = setting(
        10_000, WholeNumber(1), "flushDelayOffsetInterval", "ms",
        "Time between two writes of the delivery progress of delayed messages to disk.",
    )
    timer_enabled: bool = setting(
        True, Boolean(), "timerWheelEnable", "",
        "Allow messages to name any time of delivery.",
    )
    timer_delay_max_s: int = setting(
        259_200, WholeNumber(1), "timerMaxDelaySec", "s",
        "Maximum delay of a message that names its time of delivery.",
    )
    timer_precision_ms: int = setting(
        1_000, WholeNumber(1, 60_000), "timerPrecisionMs", "ms",
        "How late a message that names its time of delivery may be delivered.",
    )

    @property
    def timer_delay_max_ms(self) -> int:
        return self.timer_delay_max_s * 1000

    @property
    def tick_interval_s(self) -> float:
        """How often the broker looks for due messages, pulls and checks."""
        return min(_TICK_MS, self.timer_precision_ms) / 1000


# --- transactions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(_SettingsGroup):
    """Transactional messages: times of the checks, limits on what is open."""

    immunity_ms: int = setting(
        6_000, WholeNumber(0), "transactionTimeOut", "ms",
        "Time before the first check of a half message.", live=True,
    )
    checks_max: int = setting(
        15, WholeNumber(1), "transactionCheckMax", "checks",
        "After this many checks without a verdict, a half message is stranded.", live=True,
    )
    check_interval_ms: int = setting(
        30_000, WholeNumber(1), "transactionCheckInterval", "ms",
        "Time between two checks of a half message.", live=True,
    )
    refuses_halves: bool = setting(
        False, Boolean(), "rejectTransactionMessage", "",
        "Refuse transactional messages.", live=True,
    )
    check_backoff_percent: int = setting(
        100, WholeNumber(100, 1_000), "escrowCheckBackoffPercent", "%",
        "Growth of the time between two checks: 100 keeps it constant, 200 doubles it each time.",
        live=True,
    )
    immunities_ms: tuple[tuple[str, int], ...] = setting(
        (), NumberPerName(), "escrowTimeOuts", "ms",
        "Values that replace transactionTimeOut for single topics or producer groups.", live=True,
    )
    check_intervals_ms: tuple[tuple[str, int], ...] = setting(
        (), NumberPerName(), "escrowCheckIntervals", "ms",
        "Values that replace transactionCheckInterval for single topics or producer groups.",
        live=True,
    )
    open_max: int = setting(
        2_000_000, WholeNumber(1), "escrowOpenMax", "transactions",
        "Maximum number of open transactions.", live=True,
    )
    group_open_max: int = setting(
        1_000_000, WholeNumber(1), "escrowOpenPerGroupMax", "transactions",
        "Maximum number of open transactions of one producer group.", live=True,
    )
    open_bytes_max: int = setting(
        64 << 30, WholeNumber(1, 1 << 50), "escrowOpenBytesMax", "bytes",
        "Maximum size of all open half messages.", live=True,
    )
    group_open_bytes_max: int = setting(
        32 << 30, WholeNumber(1, 1 << 50), "escrowOpenBytesPerGroupMax", "bytes",
        "Maximum size of the open half messages of one producer group.", live=True,
    )
    # The pairs above as dictionaries: every half message is looked up in them.
    _immunity_by_name: dict[str, int] = field(init=False, repr=False, compare=False)
    _interval_by_name: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _SettingsGroup.__post_init__(self)
        object.__setattr__(self, "_immunity_by_name", dict(self.immunities_ms))
        object.__setattr__(self, "_interval_by_name", dict(self.check_intervals_ms))

    def immunity_of_ms(self, topic: str, group: str, requested_ms: int | None) -> int:
        """Return the time before the first check of a half message.

        The value that the message itself requests wins, then its topic's, then its group's.
        """
        if requested_ms is not None:
            return requested_ms
        by_name = self._immunity_by_name
        return by_name.get(topic) or by_name.get(group) or self.immunity_ms

    def next_check_after_ms(self, topic: str, group: str, checks: int) -> int:
        """Return how long to wait for a verdict after the given number of checks."""
        by_name = self._interval_by_name
        interval_ms = by_name.get(topic) or by_name.get(group) or self.check_interval_ms
        growth = self.check_backoff_percent / 100
        if growth > 1 and checks > 1:
            # The exponent is bounded because a large power of a float raises OverflowError.
            grown_ms = interval_ms * growth ** min(checks - 1, 64)
            interval_ms = max(interval_ms, int(min(grown_ms, _CHECK_INTERVAL_MAX_MS)))
        return interval_ms


# --- name server, metrics, logging ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvConfig(_SettingsGroup):
    """The name server; it listens on bindAddress."""

    namesrv_port: int = setting(
        9_876, WholeNumber(0, 65_535), "escrowNamesrvPort", "",
        "Port of the name server; 0 takes any free port.",
    )
    broker_scan_interval_ms: int = setting(
        5_000, WholeNumber(1), "scanNotActiveBrokerInterval", "ms",
        "Time between two searches for brokers that no longer register.",
    )

    @property
    def broker_scan_interval_s(self) -> float:
        return self.broker_scan_interval_ms / 1000


class MetricsExporter(enum.Enum):
    DISABLE = "DISABLE"
    PROM = "PROM"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(_SettingsGroup):
    """Metrics for Prometheus and health checks over HTTP."""

    metrics_exporter: MetricsExporter = setting(
        MetricsExporter.DISABLE,
        Choice(MetricsExporter, dict.fromkeys(("OTLP_GRPC", "LOG"), "only Prometheus is served")),
        "metricsExporterType", "",
        "PROM serves /metrics and /health over HTTP.",
    )
    metrics_port: int = setting(
        5_557, WholeNumber(0, 65_535), "metricsPromExporterPort", "",
        "Port of the HTTP server; 0 switches it off.",
    )
    metrics_address: str = setting(
        "", HostAddress(is_listen_address=True, can_be_empty=True), "metricsPromExporterHost", "",
        "Address of the HTTP server; if empty, bindAddress.",
    )

    @property
    def is_enabled(self) -> bool:
        return self.metrics_exporter is MetricsExporter.PROM and self.metrics_port > 0


class LogLevel(enum.Enum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class LogFormat(enum.Enum):
    TEXT = "TEXT"
    JSON = "JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(_SettingsGroup):
    """The log, which is written to standard error."""

    log_level: LogLevel = setting(
        LogLevel.INFO, Choice(LogLevel), "escrowLogLevel", "",
        "Lowest level that is written to the log.", live=True,
    )
    log_format: LogFormat = setting(
        LogFormat.TEXT, Choice(LogFormat), "escrowLogFormat", "",
        "Plain text, or one JSON object per line.", live=True,
    )


# --- overload ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig(_SettingsGroup):
    """Flow control: sends above these limits get SYSTEM_BUSY. A rate of 0 means no limit."""

    unflushed_bytes_max: int = setting(
        1 << 30, WholeNumber(FRAME_BYTES_MAX), "escrowUnflushedBytesMax", "bytes",
        "Refuse sends while more than this much of the commit log is not flushed.", live=True,
    )
    connection_sends_max: int = setting(
        0, WholeNumber(0), "escrowConnectionSendsMax", "messages/s",
        "Maximum rate of messages from one connection; 0 means no limit.", live=True,
    )
    connection_send_bytes_max: int = setting(
        0, WholeNumber(0), "escrowConnectionSendBytesMax", "bytes/s",
        "Maximum rate of message bodies from one connection; 0 means no limit.", live=True,
    )
    topic_sends_max: int = setting(
        0, WholeNumber(0), "escrowTopicSendsMax", "messages/s",
        "Maximum rate of messages to one topic; 0 means no limit.", live=True,
    )
    topic_send_bytes_max: int = setting(
        0, WholeNumber(0), "escrowTopicSendBytesMax", "bytes/s",
        "Maximum rate of message bodies to one topic; 0 means no limit.", live=True,
    )

    @property
    def has_rates(self) -> bool:
        return bool(
            self.connection_sends_max
            or self.connection_send_bytes_max
            or self.topic_sends_max
            or self.topic_send_bytes_max
        )


# --- security ------------------------------------------------------------------------------------


class TlsMode(enum.Enum):
    DISABLED = "DISABLED"
    PERMISSIVE = "PERMISSIVE"
    ENFORCING = "ENFORCING"


class ClientAuth(enum.Enum):
    NONE = "NONE"
    OPTIONAL = "OPTIONAL"
    REQUIRE = "REQUIRE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig(_SettingsGroup):
    """Access control and TLS."""

    acl_enabled: bool = setting(
        False, Boolean(), "aclEnable", "",
        "Require that every request is signed by an account that has permission for it.",
    )
    authentication_enabled: bool = setting(
        False, Boolean(), "authenticationEnabled", "",
        "Key of RocketMQ 5 with the same effect as aclEnable.",
    )
    authorization_enabled: bool = setting(
        False, Boolean(), "authorizationEnabled", "",
        "Another key of RocketMQ 5 with the same effect as aclEnable.",
    )
    acl_file: Path | None = setting(
        None, OptionalFile(), "escrowAclFile", "",
        "File with the accounts: plain_acl.yml, or users and policies; reloaded when it changes.",
    )
    strong_signature_only: bool = setting(
        False, Boolean(), "escrowStrongSignatureOnly", "",
        "Accept only EscrowMQ's own signature, which covers the whole request; RocketMQ's clients "
        "do not have it.",
    )
    inner_credentials: Secret = setting(
        Secret(""), CredentialsText(), "innerClientAuthenticationCredentials", "",
        "Account with which the broker registers with name servers of other processes.",
    )
    insecure: bool = setting(
        False, Boolean(), "escrowInsecure", "",
        "Allow an address other than loopback without aclEnable.",
    )
    tls_mode: TlsMode = setting(
        TlsMode.PERMISSIVE, Choice(TlsMode), "tls.server.mode", "",
        "Whether TLS is switched off, optional on the same ports, or required.",
    )
    tls_cert: Path | None = setting(
        None, OptionalFile(), "tls.server.certPath", "",
        "Certificate of the server with its chain, in PEM; without it there is no TLS.",
    )
    tls_key: Path | None = setting(
        None, OptionalFile(), "tls.server.keyPath", "",
        "Private key of the server's certificate, in PEM.",
    )
    tls_key_password: Secret = setting(
        Secret(""), SecretText(), "tls.server.keyPassword", "",
        "Password of the server's private key.",
    )
    tls_client_auth: ClientAuth = setting(
        ClientAuth.NONE, Choice(ClientAuth), "tls.server.need.client.auth", "",
        "Whether clients need a certificate.",
    )
    tls_trust: Path | None = setting(
        None, OptionalFile(), "tls.server.trustCertPath", "",
        "CA certificates that client certificates are verified against, in PEM.",
    )
    tls_outgoing: bool = setting(
        False, Boolean(), "tls.enable", "",
        "Use TLS for connections to the name servers in namesrvAddr.",
    )
    tls_outgoing_trust: Path | None = setting(
        None, OptionalFile(), "tls.client.trustCertPath", "",
        "CA certificates that name servers are verified against; if empty, the system's.",
    )
    tls_outgoing_cert: Path | None = setting(
        None, OptionalFile(), "tls.client.certPath", "",
        "Certificate that the broker presents to name servers.",
    )
    tls_outgoing_key: Path | None = setting(
        None, OptionalFile(), "tls.client.keyPath", "",
        "Private key of the certificate that the broker presents to name servers.",
    )

    def __post_init__(self) -> None:
        _SettingsGroup.__post_init__(self)
        if self.is_acl_on and self.acl_file is None:
            raise ConfigError("aclEnable=true: escrowAclFile must name the file of the accounts")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("set both tls.server.certPath and tls.server.keyPath, or neither")
        if self.tls_mode is TlsMode.ENFORCING and self.tls_cert is None:
            raise ConfigError("tls.server.mode=ENFORCING: tls.server.certPath must name a file")
        if self.tls_client_auth is not ClientAuth.NONE and self.tls_trust is None:
            raise ConfigError(
                f"tls.server.need.client.auth={self.tls_client_auth.value}: "
                "tls.server.trustCertPath must name a file of CA certificates"
            )

    @property
    def is_acl_on(self) -> bool:
        return self.acl_enabled or self.authentication_enabled or self.authorization_enabled

    @property
    def has_tls(self) -> bool:
        return self.tls_mode is not TlsMode.DISABLED and self.tls_cert is not None

    @property
    def requires_tls(self) -> bool:
        return self.tls_mode is TlsMode.ENFORCING


# --- all groups ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All groups. The names of the fields are the names of the tables in a TOML file."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    consume: ConsumeConfig = field(default_factory=ConsumeConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    namesrv: NamesrvConfig = field(default_factory=NamesrvConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)


GROUPS: Final[dict[str, type[_SettingsGroup]]] = {
    "broker": BrokerConfig,
    "network": NetworkConfig,
    "store": StoreConfig,
    "consume": ConsumeConfig,
    "delay": DelayConfig,
    "transaction": TransactionConfig,
    "namesrv": NamesrvConfig,
    "metrics": MetricsConfig,
    "security": SecurityConfig,
    "log": LogConfig,
    "overload": OverloadConfig,
}
