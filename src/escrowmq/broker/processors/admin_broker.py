"""Administration of the broker as a whole.

    BrokerAdmin       runtime information, rates, settings
    BackupProcessor   prepares a backup: saves and flushes everything, returns the end of the log

`escrowmq store backup` sends PREPARE_BACKUP before it copies and again after it has copied the
tables. The tables it has then refer to nothing beyond the log end in the second response, up to
which it copies the log. The request carries a token, which the broker writes to its store
directory: it proves that the broker which responds is the one that runs on the directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from escrowmq.broker.delayed_messages import DelayedMessages
from escrowmq.broker.dispatch import Channel, ErrorCodes, Handler, respond_error
from escrowmq.broker.statistics import Statistics, TrafficRate
from escrowmq.broker.turn import WhenFlushed
from escrowmq.clock import ClockReport
from escrowmq.errors import ConfigError, CorruptRecord, RecordNotFound, RequestRefused, StoreError
from escrowmq.message.topic_config import DataVersion
from escrowmq.remoting.bodies import encode_body
from escrowmq.remoting.bodies_admin import Rate, Rates, RuntimeTable
from escrowmq.remoting.codes import VERSION, RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import (
    BrokerConfigResponse,
    PrepareBackup,
    PrepareBackupResponse,
    ViewBrokerStats,
)
from escrowmq.remoting.requests import Request
from escrowmq.store.backup import TOKEN_PATH
from escrowmq.store.disk import Disk, replace_file
from escrowmq.store.store import MessageStore

CONFIG_CHANGE_BYTES_MAX: Final = 64 << 10
_GIB: Final = 1 << 30
# This broker has no thread pools and no timer wheel, but RocketMQ's tools expect these keys.
_EMPTY_THREAD_POOLS: Final = {
    f"{pool}ThreadPoolQueue{figure}": "0"
    for pool in ("send", "pull", "query", "litePull", "ack")
    for figure in ("Size", "HeadWaitTimeMills")
} | {"EndTransactionQueueSize": "0", "pageCacheLockTimeMills": "0", "dispatchMaxBuffer": "0"}
_EMPTY_TIMERS: Final = dict.fromkeys(
    (
        "timerReadBehind",
        "timerOffsetBehind",
        "timerCongestNum",
        "timerEnqueueTps",
        "timerDequeueTps",
    ),
    "0",
)


class BrokerSettings(Protocol):
    """The settings of a running broker. `server/live_config.py` has the implementation."""

    def text(self) -> str:
        """Return all settings as `key=value` lines, under RocketMQ's keys."""

    def change(self, text: str) -> None:
        """Apply such lines. Raise ConfigError and change nothing if one is not accepted."""


class FixedSettings:
    """No settings, for a broker without a server."""

    def text(self) -> str:
        return ""

    def change(self, text: str) -> None:
        raise ConfigError("the settings of this broker cannot be changed at run time")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerInfo:
    version: str = "EscrowMQ"
    cluster: str = "DefaultCluster"
    request_path: str = ""  # `native`, or `Python` and the reason


class BrokerAdmin:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        statistics: Statistics,
        settings: Callable[[], BrokerSettings],
        broker_info: BrokerInfo,
        delayed_messages: DelayedMessages,
        *,
        wall_ms: Callable[[int], int],
        clock_report: Callable[[], ClockReport],
    ) -> None:
        self._store = store
        self._wall_ms = wall_ms
        self._clock_report = clock_report
        self._delayed_messages = delayed_messages
        self._disk = disk
        self._statistics = statistics
        self._settings = settings
        self._broker_info = broker_info
        self._start_ms = 0
        self._start_log_end = store.end
        self._version = DataVersion()

    def tick(self, now_ms: int) -> None:
        self._start_ms = self._start_ms or now_ms
        self._statistics.tick(now_ms)

    def handlers(self) -> list[Handler]:
        code = RequestCode
        return [
            Handler(code.GET_BROKER_CONFIG, self.get_config),
            Handler(code.UPDATE_BROKER_CONFIG, self.update_config),
            Handler(code.GET_BROKER_RUNTIME_INFO, self.get_runtime_info),
            Handler(code.VIEW_BROKER_STATS_DATA, self.get_stats),
            Handler(code.CLEAN_EXPIRED_CONSUMEQUEUE, self.no_op),
            Handler(code.DELETE_EXPIRED_COMMITLOG, self.no_op),
        ]

    # --- settings --------------------------------------------------------------------------------

    def get_config(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        version = msgspec.json.encode(self._version).decode()
        body = self._settings().text().encode()
        channel.respond(request, BrokerConfigResponse(version=version), body=body)

    def update_config(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        if len(request.body) > CONFIG_CHANGE_BYTES_MAX:
            raise ConfigError(
                f"{len(request.body)} bytes of settings, the limit is {CONFIG_CHANGE_BYTES_MAX}"
            )
        try:
            text = str(request.body, "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"the settings are not UTF-8: {error}") from error
        self._settings().change(text)
        self._version = self._version.next(now_ms)
        channel.respond(request)

    # --- runtime information ---------------------------------------------------------------------

    def get_runtime_info(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        table = {
            **_EMPTY_THREAD_POOLS,
            **_EMPTY_TIMERS,
            **self._identity_info(now_ms),
            **self._traffic_info(now_ms),
            **self._log_info(),
            **self._disk_info(),
            **self._delay_info(),
            **self._clock_info(now_ms),
        }
        channel.respond(request, body=encode_body(RuntimeTable(table=dict(sorted(table.items())))))

    def _identity_info(self, now_ms: int) -> dict[str, str]:
        seconds = max(0, now_ms - (self._start_ms or now_ms)) // 1000
        days, hours, minutes = seconds // 86_400, seconds // 3_600 % 24, seconds // 60 % 60
        return {
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": self._broker_info.version,
            "escrowRequestPath": self._broker_info.request_path,
            "brokerActive": "true" if self._store.is_writable else "false",
            "bootTimestamp": str(self._start_ms),
            "startAcceptSendRequestTimeStamp": "0",
            "runtime": f"[ {days} days, {hours} hours, {minutes} minutes, {seconds % 60} seconds ]",
        }

    def _traffic_info(self, now_ms: int) -> dict[str, str]:
        totals = self._statistics.totals()
        today, yesterday = self._statistics.morning, self._statistics.yesterday_morning
        found_and_missed = zip(
            self._rates("found", now_ms), self._rates("missed", now_ms), strict=True
        )
        stored_bytes = self._store.end - self._start_log_end
        fetched = _format_rates(self._rates("fetched", now_ms))
        return {
            "putTps": _format_rates(self._rates("put", now_ms)),
            "getFoundTps": _format_rates(self._rates("found", now_ms)),
            "getMissTps": _format_rates(self._rates("missed", now_ms)),
            "getTotalTps": _format_rates(
                tuple(found + missed for found, missed in found_and_missed)
            ),
            "getTransferedTps": fetched,  # the spelling before 5.0
            "getTransferredTps": fetched,
            "msgPutTotalTodayNow": str(totals.put),
            "msgPutTotalTodayMorning": str(today.put),
            "msgPutTotalYesterdayMorning": str(yesterday.put),
            "msgGetTotalTodayNow": str(totals.fetched),
            "msgGetTotalTodayMorning": str(today.fetched),
            "msgGetTotalYesterdayMorning": str(yesterday.fetched),
            "putMessageTimesTotal": str(totals.put),
            "putMessageSizeTotal": str(stored_bytes),
            "putMessageAverageSize": str(stored_bytes / totals.put if totals.put else 0.0),
        }

    def _rates(self, field: str, now_ms: int) -> tuple[float, ...]:
        return self._statistics.rates(field, now_ms)

    def _delay_info(self) -> dict[str, str]:
        delayed_messages = self._delayed_messages
        return {
            "escrowDelayedWaiting": str(delayed_messages.waiting_count),
            "escrowDelayedSetAside": str(delayed_messages.set_aside_count),
            "escrowDelayedLost": str(delayed_messages.counters.lost),
        }

    def _clock_info(self, now_ms: int) -> dict[str, str]:
        report = self._clock_report()
        return {
            # The other times come from a clock that follows the wall clock slowly.
            "escrowWallTimestamp": str(self._wall_ms(now_ms)),
            "escrowClockJumps": str(report.jumps),
            "escrowClockChangeAtStart": str(report.change_at_start_ms),
            "escrowStoredAhead": str(report.stored_ahead_ms),
        }

    def _log_info(self) -> dict[str, str]:
        store = self._store
        return {
            "commitLogMinOffset": str(store.begin),
            "commitLogMaxOffset": str(store.end),
            "remainHowManyDataToFlush": f"{store.end - store.flushed_offset} B",
            "dispatchBehindBytes": "0",  # queue entries and keys are written with the message
            "earliestMessageTimeStamp": str(self._oldest_ms()),
            "escrowDamageFound": str(store.damage.total),
        }

    def _oldest_ms(self) -> int:
        try:
            record = next(self._store.records(self._store.begin, self._store.end), None)
        except (RecordNotFound, CorruptRecord):
            return -1
        return -1 if record is None else record.stored_ms

    def _disk_info(self) -> dict[str, str]:
        try:
            usage = self._disk.usage()
        except StoreError:
            return {}
        total, free = usage.total_bytes / _GIB, usage.free_bytes / _GIB
        ratio = f"{usage.used_ratio:.4f}"
        return {
            "commitLogDiskRatio": ratio,
            "consumeQueueDiskRatio": ratio,
            "commitLogDirCapacity": f"Total : {total:.1f} GiB, Free : {free:.1f} GiB.",
        }

    def get_stats(self, channel: Channel, request: Request[ViewBrokerStats], now_ms: int) -> None:
        fields = request.head.fields
        rates = self._find_rates(fields.stats_name, fields.stats_key, now_ms)
        if rates is None:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"no statistics {fields.stats_name[:100]} of {fields.stats_key[:100]}",
            )
        minute, hour, day = (Rate(sum=rate.count, tps=rate.per_s, avgpt=0.0) for rate in rates)
        body = Rates(stats_minute=minute, stats_hour=hour, stats_day=day)
        channel.respond(request, body=encode_body(body))

    def no_op(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        """Respond to a request to delete expired files, which the broker does by itself."""
        channel.respond(request)

    def _find_rates(
        self, name: str, key: str, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate] | None:
        statistics = self._statistics
        topic, _, group = key.partition("@")
        match name:
            case "TOPIC_PUT_NUMS" | "TOPIC_PUT_SIZE" if statistics.topic_traffic(key) is not None:
                return statistics.topic_rates(key, int(name.endswith("SIZE")), now_ms)
            case "GROUP_GET_NUMS" | "GROUP_GET_SIZE" if (
                statistics.group_traffic(topic, group) is not None
            ):
                return statistics.group_rates(topic, group, int(name.endswith("SIZE")), now_ms)
            case "BROKER_PUT_NUMS" if key == self._broker_info.cluster:
                return statistics.broker_rates("put", now_ms)
            case "BROKER_GET_NUMS" if key == self._broker_info.cluster:
                return statistics.broker_rates("fetched", now_ms)
        return None


def _format_rates(rates: tuple[float, ...]) -> str:
    """Format the rates of the last 10 s, one minute and ten minutes."""
    return " ".join(f"{rate:.2f}" for rate in rates)


# --- backup --------------------------------------------------------------------------------------

TOKEN_LENGTH_MAX: Final = 64
_BACKUP_ERRORS: Final[ErrorCodes] = {StoreError: ResponseCode.SYSTEM_ERROR}


class BackupProcessor:
    def __init__(
        self, disk: Disk, store: MessageStore, save: Callable[[], None], flush: WhenFlushed | None
    ) -> None:
        self._disk = disk
        self._store = store
        self._save = save
        self._flush = flush  # None: flush in the call

    def handlers(self) -> list[Handler]:
        return [
            Handler(RequestCode.PREPARE_BACKUP, self.prepare_backup, errors=_BACKUP_ERRORS),
        ]

    def prepare_backup(
        self, channel: Channel, request: Request[PrepareBackup], now_ms: int
    ) -> None:
        store, token = self._store, request.head.fields.token
        if len(token) > TOKEN_LENGTH_MAX:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR,
                f"the token has {len(token)} characters, the limit is {TOKEN_LENGTH_MAX}",
            )
        replace_file(self._disk, TOKEN_PATH, token.encode())
        self._save()
        if self._flush is None:
            store.flush()
        end = store.end

        def flushed(error: StoreError | None) -> None:
            if error is None:
                fields = PrepareBackupResponse(log_begin=store.begin, log_end=end)
                channel.respond(request, fields)
            else:
                respond_error(channel, request, error, _BACKUP_ERRORS)

        if self._flush is None:
            flushed(None)
        else:
            self._flush(end, flushed)
