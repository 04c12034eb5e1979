"""The settings themselves, in the groups that parts of the server are given.

A field's name carries its unit. Its `conf` is what RocketMQ's broker.conf calls it, and its unit is
RocketMQ's, so that an operator's file works here as it stands; a name that begins with `escrow` is
ours alone. Defaults are those of RocketMQ 5.5.0, but for the addresses (loopback, until somebody
says otherwise), the broker's name and the directory.

Settings of the log lines that the server writes.

Settings of what is refused before memory or disk is at risk.

Settings of TLS and of access control.

Those with dots are RocketMQ's system properties, which it reads from its command line or from
tls.properties; here they are settings like any other.

Settings of transactional messages.
"""

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
FRAME_BYTES_MAX: Final = 16 * MIB  # RocketMQ's; a connection must have room for one
LOOPBACK: Final = "127.0.0.1"
_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


class FlushMode(enum.Enum):
    ASYNC = "ASYNC_FLUSH"
    SYNC = "SYNC_FLUSH"


class MetricsExporter(enum.Enum):
    DISABLE = "DISABLE"
    PROM = "PROM"


class BrokerRole(enum.Enum):
    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"


def _setting(
    default: object, setting_type: SettingType, conf: str, unit: str, help_text: str
) -> Any:
    return field(
        default=default,
        metadata={"kind": setting_type, "conf": conf, "unit": unit, "help": help_text},
    )


def _boolean(default: bool, conf: str, help_text: str) -> Any:
    return _setting(default, Boolean(), conf, "", help_text)


def _milliseconds(default: int, conf: str, help_text: str, *, minimum: int = 1) -> Any:
    return _setting(default, WholeNumber(minimum), conf, "ms", help_text)


class _SettingsGroup:
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
class BrokerConfig(_SettingsGroup):
    """Who this broker is, what it allows, and where it registers."""

    cluster_name: str = _setting(
        "DefaultCluster",
        PrintableName(),
        "brokerClusterName",
        "",
        "The cluster this broker belongs to.",
    )
    broker_name: str = _setting(
        "broker-a",
        PrintableName(),
        "brokerName",
        "",
        "The name under which clients know this broker.",
    )
    broker_id: int = _setting(
        0, WholeNumber(0, 0), "brokerId", "", "0, which says master; there are no slaves here."
    )
    advertised_address: str = _setting(
        LOOPBACK,
        HostAddress(is_listen_address=False),
        "brokerIP1",
        "",
        "The address that clients are told; if empty, the machine's own, found at start.",
    )
    namesrv_addresses: tuple[str, ...] = _setting(
        (), AddressList(), "namesrvAddr", "", "The name servers to register with."
    )
    broker_role: BrokerRole = _setting(  # noqa: RUF009  # it is a field()
        BrokerRole.ASYNC_MASTER,
        Choice(BrokerRole, {"SLAVE": "EscrowMQ has no slaves"}),
        "brokerRole",
        "",
        "Either word says master; there are no replicas to wait for.",
    )
    broker_permission: int = _setting(
        6, WholeNumber(0, 7), "brokerPermission", "", "4 to be read, 2 to be written, 6 for both."
    )
    creates_topics: bool = _boolean(
        True, "autoCreateTopicEnable", "Whether the first message to a topic creates it."
    )
    topic_queues: int = _setting(
        8,
        WholeNumber(1, 65_535),
        "defaultTopicQueueNums",
        "queues",
        "At most so many in a topic created so.",
    )
    creates_groups: bool = _boolean(
        True, "autoCreateSubscriptionGroup", "Whether a group's first consumer creates the group."
    )
    has_cluster_topic: bool = _boolean(
        True, "clusterTopicEnable", "Whether there is a topic with the name of the cluster."
    )
    has_broker_topic: bool = _boolean(
        True, "brokerTopicEnable", "Whether there is a topic with the name of the broker."
    )
    register_interval_ms: int = _setting(
        30_000,
        WholeNumber(100, 60_000),
        "registerNameServerPeriod",
        "ms",
        "Time between two registrations with the name servers.",
    )
    region_id: str = _setting(
        "DefaultRegion",
        PrintableName(),
        "regionId",
        "",
        "The region that stored messages are marked with.",
    )
    trace_on: bool = _boolean(True, "traceOn", "Whether clients are told to trace their messages.")
    stores_replies: bool = _boolean(
        True, "storeReplyMessageEnable", "Whether the answer to a request message is stored too."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig(_SettingsGroup):
    """Where the server listens, and how much it takes on."""

    bind_address: str = _setting(
        LOOPBACK,
        HostAddress(is_listen_address=True),
        "bindAddress",
        "",
        "The address to listen on.",
    )
    listen_port: int = _setting(
        10_911, WholeNumber(0, 65_535), "listenPort", "", "The broker's port; 0 takes any free one."
    )
    idle_max_s: int = _setting(
        120,
        WholeNumber(1),
        "serverChannelMaxIdleTimeSeconds",
        "s",
        "A connection that is silent for so long is closed.",
    )
    connections_max: int = _setting(
        10_000,
        WholeNumber(1),
        "escrowConnectionsMax",
        "connections",
        "At most so many; one more is closed at once.",
    )
    in_flight_bytes_max: int = _setting(
        256 * MIB,
        WholeNumber(FRAME_BYTES_MAX),
        "escrowInFlightBytesMax",
        "bytes",
        "Requests and answers in memory; nothing more is read until there is less.",
    )
    connection_in_flight_bytes_max: int = _setting(
        32 * MIB,
        WholeNumber(FRAME_BYTES_MAX),
        "escrowConnectionInFlightBytesMax",
        "bytes",
        "The same for a single connection.",
    )

    def __post_init__(self) -> None:
        _SettingsGroup.__post_init__(self)
        if self.connection_in_flight_bytes_max > self.in_flight_bytes_max:
            raise ConfigError(
                f"escrowConnectionInFlightBytesMax={self.connection_in_flight_bytes_max}: "
                f"must not be more than escrowInFlightBytesMax={self.in_flight_bytes_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(_SettingsGroup):
    """Where messages are kept, how safely and how long."""

    root_dir: Path = _setting(  # noqa: RUF009  # it is a field()
        Path("escrowmq-data"),
        DirectoryPath(),
        "storePathRootDir",
        "",
        "The directory of the store.",
    )
    flush_mode: FlushMode = _setting(  # noqa: RUF009  # it is a field()
        FlushMode.ASYNC,
        Choice(FlushMode),
        "flushDiskType",
        "",
        "Whether a send is answered before or after its message is safe from a power cut.",
    )
    sync_flush_timeout_ms: int = _milliseconds(
        5_000, "syncFlushTimeout", "A send under SYNC_FLUSH waits so long for its flush."
    )
    flush_interval_ms: int = _milliseconds(
        500, "flushIntervalCommitLog", "Time between two flushes under ASYNC_FLUSH."
    )
    checkpoint_interval_ms: int = _milliseconds(
        1_000, "escrowCheckpointInterval", "Time between two checkpoints of queues and index."
    )
    segment_bytes: int = _setting(
        1 << 30, WholeNumber(4096), "mappedFileSizeCommitLog", "bytes", "The size of a log file."
    )
    queue_file_bytes: int = _setting(
        6_000_000,
        WholeNumber(20, INT_MAX // 20 * 20, multiple_of=20),
        "mappedFileSizeConsumeQueue",
        "bytes",
        "The size of a queue file, 20 for each message; rounded up to a multiple of that.",
    )
    index_enabled: bool = _boolean(
        True, "messageIndexEnable", "Whether new messages can be found by their keys."
    )
    index_slots: int = _setting(
        5_000_000, WholeNumber(1), "maxHashSlotNum", "slots", "Hash slots of an index file."
    )
    index_entries: int = _setting(
        20_000_000, WholeNumber(2), "maxIndexNum", "keys", "Keys that an index file has room for."
    )
    message_bytes_max: int = _setting(
        4 * MIB, WholeNumber(1), "maxMessageSize", "bytes", "The longest body that is taken."
    )
    sealed: bool = _boolean(
        False, "enabledAppendPropCRC", "Whether a record carries a checksum of all of it."
    )
    reserved_hours: int = _setting(
        72, WholeNumber(1), "fileReservedTime", "hours", "A log file is kept for so long."
    )
    delete_hours: tuple[int, ...] = _setting(
        (4,), HoursOfDay(), "deleteWhen", "", "The hours of the day at which old files go."
    )
    expire_percent: int = _setting(
        75,
        WholeNumber(1, 100),
        "diskMaxUsedSpaceRatio",
        "percent",
        "A disk fuller than this loses its old files at any hour.",
    )
    force_expire_percent: int = _setting(
        85,
        WholeNumber(1, 100),
        "diskSpaceCleanForciblyRatio",
        "percent",
        "A disk fuller than this loses its oldest files, whatever their age.",
    )
    refuse_percent: int = _setting(
        90,
        WholeNumber(1, 100),
        "diskSpaceWarningLevelRatio",
        "percent",
        "A disk fuller than this takes no more messages.",
    )
    expire_interval_ms: int = _milliseconds(
        10_000, "cleanResourceInterval", "Time between two looks for files to delete."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeConfig(_SettingsGroup):
    """What one pull brings, and how long it may wait."""

    long_polling: bool = _boolean(
        True, "longPollingEnable", "Whether a pull waits as long as its consumer allows."
    )
    short_poll_ms: int = _milliseconds(
        1_000,
        "shortPollingTimeMills",
        "A pull waits so long if longPollingEnable is false.",
        minimum=0,
    )
    filters_by_sql: bool = _boolean(
        False, "enablePropertyFilter", "Whether consumers may filter by SQL92 expressions."
    )
    pull_messages_max: int = _setting(
        32,
        WholeNumber(1),
        "maxTransferCountOnMessageInMemory",
        "messages",
        "At most so many in a pull.",
    )
    pull_bytes_max: int = _setting(
        262_144,
        WholeNumber(1),
        "maxTransferBytesOnMessageInMemory",
        "bytes",
        "At most so much in a pull; a longer message comes alone.",
    )
    waiting_pulls_max: int = _setting(
        100_000,
        WholeNumber(0),
        "escrowWaitingPullsMax",
        "pulls",
        "At most so many wait; one more is answered at once.",
    )
    offsets_interval_ms: int = _milliseconds(
        5_000, "flushConsumerOffsetInterval", "Time between two writes of the consumers' offsets."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(_SettingsGroup):
    """Messages that are delivered later."""

    delay_levels_ms: tuple[int, ...] = _setting(
        DelayLevels().parse(_DELAY_LEVELS),
        DelayLevels(),
        "messageDelayLevel",
        "",
        "The delays that a message may choose from, level 1 first.",
    )
    delay_offsets_interval_ms: int = _milliseconds(
        10_000, "flushDelayOffsetInterval", "Time between two writes of how far each level is."
    )
    timer_enabled: bool = _boolean(
        True, "timerWheelEnable", "Whether a message may name any time of delivery."
    )
    timer_delay_max_s: int = _setting(
        259_200, WholeNumber(1), "timerMaxDelaySec", "s", "The farthest such time from now."
    )
    timer_precision_ms: int = _setting(
        1_000,
        WholeNumber(1, 60_000),
        "timerPrecisionMs",
        "ms",
        "A message may be late by this much.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvConfig(_SettingsGroup):
    """The name server; it listens on the broker's bindAddress."""

    namesrv_port: int = _setting(
        9_876,
        WholeNumber(0, 65_535),
        "escrowNamesrvPort",
        "",
        "The name server's port; 0 takes any free one.",
    )
    broker_scan_interval_ms: int = _milliseconds(
        5_000, "scanNotActiveBrokerInterval", "Time between two looks for brokers that are gone."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig(_SettingsGroup):
    """Figures for Prometheus over HTTP."""

    metrics_exporter: MetricsExporter = _setting(  # noqa: RUF009  # it is a field()
        MetricsExporter.DISABLE,
        Choice(MetricsExporter, dict.fromkeys(("OTLP_GRPC", "LOG"), "only Prometheus is served")),
        "metricsExporterType",
        "",
        "Whether metrics are served.",
    )
    metrics_port: int = _setting(
        5_557,
        WholeNumber(0, 65_535),
        "metricsPromExporterPort",
        "",
        "The port for that; 0 is none.",
    )
    metrics_address: str = _setting(
        "",
        HostAddress(is_listen_address=True, can_be_empty=True),
        "metricsPromExporterHost",
        "",
        "The address for that; if empty, bindAddress.",
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
    """What the server writes to standard error."""

    log_level: LogLevel = _setting(  # noqa: RUF009  # it is a field()
        LogLevel.INFO, Choice(LogLevel), "escrowLogLevel", "", "Lines below this are not written."
    )
    log_format: LogFormat = _setting(  # noqa: RUF009  # it is a field()
        LogFormat.TEXT,
        Choice(LogFormat),
        "escrowLogFormat",
        "",
        "Lines for people, or one JSON object each.",
    )


def _per_second(conf: str, unit: str, help_text: str) -> Any:
    return _setting(0, WholeNumber(0), conf, unit, help_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig(_SettingsGroup):
    """More than this is answered with SYSTEM_BUSY; 0 is no limit."""

    unflushed_bytes_max: int = _setting(
        1 << 30,
        WholeNumber(FRAME_BYTES_MAX),
        "escrowUnflushedBytesMax",
        "bytes",
        "No sends while more of the log than this is not on the disk yet.",
    )
    connection_sends_max: int = _per_second(
        "escrowConnectionSendsMax", "messages/s", "What one connection may send."
    )
    connection_send_bytes_max: int = _per_second(
        "escrowConnectionSendBytesMax", "bytes/s", "The same in bytes of bodies."
    )
    topic_sends_max: int = _per_second(
        "escrowTopicSendsMax", "messages/s", "What all together may send to one topic."
    )
    topic_send_bytes_max: int = _per_second(
        "escrowTopicSendBytesMax", "bytes/s", "The same in bytes of bodies."
    )


def _optional_file(conf: str, help_text: str) -> Any:
    return _setting(None, OptionalFile(), conf, "", help_text)


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
    """Who may talk to this server, and who can listen in."""

    acl_enabled: bool = _boolean(
        False, "aclEnable", "Whether requests must be signed by an account that may make them."
    )
    authentication_enabled: bool = _boolean(
        False, "authenticationEnabled", "RocketMQ 5's word for it: either of the three says yes."
    )
    authorization_enabled: bool = _boolean(
        False, "authorizationEnabled", "The third: a signature and a permission go together here."
    )
    acl_file: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "escrowAclFile",
        "The accounts: plain_acl.yml, or users and policies. It is read again when it changes.",
    )
    inner_credentials: Secret = _setting(  # noqa: RUF009  # it is a field()
        Secret(""),
        CredentialsText(),
        "innerClientAuthenticationCredentials",
        "",
        "The account by which the broker registers with other name servers.",
    )
    insecure: bool = _boolean(
        False, "escrowInsecure", "Whether others than this machine are served without aclEnable."
    )
    tls_mode: TlsMode = _setting(  # noqa: RUF009  # it is a field()
        TlsMode.PERMISSIVE,
        Choice(TlsMode),
        "tls.server.mode",
        "",
        "Whether TLS is refused, possible on the same ports, or the only way in.",
    )
    tls_cert: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.server.certPath",
        "The server's certificate and its chain, in PEM; without it there is no TLS.",
    )
    tls_key: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.server.keyPath", "The certificate's private key, in PEM."
    )
    tls_key_password: Secret = _setting(  # noqa: RUF009  # it is a field()
        Secret(""), SecretText(), "tls.server.keyPassword", "", "The password of that key."
    )
    tls_client_auth: ClientAuth = _setting(  # noqa: RUF009  # it is a field()
        ClientAuth.NONE,
        Choice(ClientAuth),
        "tls.server.need.client.auth",
        "",
        "Whether clients must show a certificate.",
    )
    tls_trust: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.server.trustCertPath", "Whose certificates of clients are believed, in PEM."
    )
    tls_outgoing: bool = _boolean(
        False, "tls.enable", "Whether the broker speaks TLS to the name servers of namesrvAddr."
    )
    tls_outgoing_trust: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.client.trustCertPath",
        "Whose certificates of name servers are believed; if empty, the system's.",
    )
    tls_outgoing_cert: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.client.certPath", "The certificate that is shown to them."
    )
    tls_outgoing_key: Path | None = _optional_file(  # noqa: RUF009  # it is a field()
        "tls.client.keyPath", "Its private key."
    )

    def __post_init__(self) -> None:
        _SettingsGroup.__post_init__(self)
        if self.is_acl_on and self.acl_file is None:
            raise ConfigError("aclEnable=true: escrowAclFile must name the file of the accounts")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls.server.certPath and tls.server.keyPath belong together")
        if self.tls_mode is TlsMode.ENFORCING and self.tls_cert is None:
            raise ConfigError("tls.server.mode=ENFORCING: tls.server.certPath must name a file")
        if self.tls_client_auth is not ClientAuth.NONE and self.tls_trust is None:
            raise ConfigError(
                f"tls.server.need.client.auth={self.tls_client_auth.value}: "
                "tls.server.trustCertPath must say whom to believe"
            )

    @property
    def is_acl_on(self) -> bool:
        return self.acl_enabled or self.authentication_enabled or self.authorization_enabled

    @property
    def has_tls(self) -> bool:
        return self.tls_mode is not TlsMode.DISABLED and self.tls_cert is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(_SettingsGroup):
    """Halves: when their producer is asked, and how often."""

    immunity_ms: int = _milliseconds(
        6_000, "transactionTimeOut", "A half is left alone for so long.", minimum=0
    )
    checks_max: int = _setting(
        15, WholeNumber(1), "transactionCheckMax", "checks", "After so many a half is stranded."
    )
    check_interval_ms: int = _milliseconds(
        30_000, "transactionCheckInterval", "Time between two checks of one half."
    )
    refuses_halves: bool = _boolean(
        False, "rejectTransactionMessage", "Whether transactional messages are refused."
    )
    check_backoff_percent: int = _setting(
        100,
        WholeNumber(100, 1_000),
        "escrowCheckBackoffPercent",
        "%",
        "The time between two checks, against the time before: 100 keeps it, 200 doubles it.",
    )
    immunities_ms: tuple[tuple[str, int], ...] = _setting(
        (),
        NumberPerName(),
        "escrowTimeOuts",
        "ms",
        "For single topics or groups, instead of transactionTimeOut.",
    )
    check_intervals_ms: tuple[tuple[str, int], ...] = _setting(
        (),
        NumberPerName(),
        "escrowCheckIntervals",
        "ms",
        "For single topics or groups, instead of transactionCheckInterval.",
    )
    open_max: int = _setting(
        2_000_000, WholeNumber(1), "escrowOpenMax", "transactions", "At most so many are open."
    )
    group_open_max: int = _setting(
        1_000_000,
        WholeNumber(1),
        "escrowOpenPerGroupMax",
        "transactions",
        "At most so many of one producer group are open.",
    )
    open_bytes_max: int = _setting(
        64 << 30,
        WholeNumber(1, 1 << 50),
        "escrowOpenBytesMax",
        "bytes",
        "At most so much of the log is open transactions.",
    )
    group_open_bytes_max: int = _setting(
        32 << 30,
        WholeNumber(1, 1 << 50),
        "escrowOpenBytesPerGroupMax",
        "bytes",
        "At most so much of the log is open transactions of one producer group.",
    )
