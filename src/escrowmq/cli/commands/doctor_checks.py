"""The checks of `escrowmq doctor`: this machine, its configuration, and a cluster.

Every check yields a CheckResult: ok, warning or problem, with a remedy unless it is ok.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import resource
import socket
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from escrowmq.admin.cluster import BrokerAddress, Cluster, error_text
from escrowmq.admin.dead_letters import DeadLetter, dead_letter_queues, read_dead_letters
from escrowmq.admin.queries import (
    all_progress,
    broker_runtime,
    broker_settings,
    consumer_connections,
    disk_used_ratio,
    total_lag,
    uptime_s,
)
from escrowmq.cli.output import printable
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.clock import Clock, SystemClock
from escrowmq.config import Config, ResolvedConfig
from escrowmq.config.loading import is_loopback
from escrowmq.errors import (
    EscrowError,
    RequestRefused,
    SparkNotAvailable,
    StoreError,
    StoreLocked,
    UnknownRequest,
)
from escrowmq.message.names import is_system_group
from escrowmq.native import load_native
from escrowmq.parsing import format_rough_duration
from escrowmq.remoting.bodies import TransactionEntry, TransactionList, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ListTransactions
from escrowmq.store import log_ages
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import ABORT_PATH, LOCK_PATH

# --- results -------------------------------------------------------------------------------------


class CheckLevel(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but needs attention
    PROBLEM = "problem"  # it does not work, or will soon stop working


@dataclass(frozen=True, slots=True)
class CheckResult:
    subject: str
    level: CheckLevel
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.subject,
            "level": self.level.value,
            "detail": self.detail,
            "remedy": self.remedy or None,
        }


def ok(subject: str, detail: str) -> CheckResult:
    return CheckResult(subject, CheckLevel.OK, detail)


def warning(subject: str, detail: str, remedy: str) -> CheckResult:
    return CheckResult(subject, CheckLevel.WARNING, detail, remedy)


def problem(subject: str, detail: str, remedy: str) -> CheckResult:
    return CheckResult(subject, CheckLevel.PROBLEM, detail, remedy)


_LEVEL_LABELS: Final = {
    CheckLevel.OK: "ok     ",
    CheckLevel.WARNING: "WARNING",
    CheckLevel.PROBLEM: "PROBLEM",
}


def check_lines(results: Iterable[CheckResult]) -> Iterator[str]:
    """Yield a line for each result, its remedy below it, and a summary."""
    shown = list(results)
    width = max((len(result.subject) for result in shown), default=0)
    for result in shown:
        yield f"{_LEVEL_LABELS[result.level]}  {result.subject:<{width}}  {result.detail}"
        if result.remedy:
            yield f"{'':<{width + 11}}-> {result.remedy}"
    problems = sum(result.level is CheckLevel.PROBLEM for result in shown)
    warnings = sum(result.level is CheckLevel.WARNING for result in shown)
    if shown:
        yield ""
    if problems or warnings:
        yield f"{_count_text(problems, 'problem')}, {_count_text(warnings, 'warning')}"
    else:
        yield "no problems"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# --- Python --------------------------------------------------------------------------------------

_MIN_PYTHON: Final = (3, 11)
_REQUIRED_PACKAGES: Final = ("click", "lz4", "msgspec", "yaml", "rich")
_EXTRAS: Final = {
    "spark": ("pyspark", "pyarrow"),
    "sql": ("sqlalchemy",),
    "django": ("django",),
    "otel": ("opentelemetry",),
    "fast": ("isal", "escrowmq_native"),
}


def check_python() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MIN_PYTHON:
        yield problem("Python", version, "install Python 3.11 or newer, and escrowmq with it")
    else:
        yield ok("Python", f"{version}, escrowmq {importlib.metadata.version('escrowmq')}")
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        yield problem("packages", f"not installed: {', '.join(missing)}", "pip install escrowmq")
    if find_spec("uvloop") is None:
        yield problem(
            "packages", "uvloop is not installed: serve cannot start", "pip install escrowmq"
        )
    native = load_native()
    yield ok("request path", f"of a broker that is started here: {native.description}")
    installed = [extra for extra, names in _EXTRAS.items() if all(map(find_spec, names))]
    absent = [extra for extra in _EXTRAS if extra not in installed]
    detail = ", ".join(installed) or "none"
    if absent:
        detail += f"; not installed: {', '.join(absent)} (pip install escrowmq[NAME] if needed)"
    yield ok("extras", detail)
    if "spark" in installed:
        yield _check_spark()


def _check_spark() -> CheckResult:
    from escrowmq.spark.session import check_java, check_pyspark

    try:
        check_pyspark()
        release = check_java()
    except (SparkNotAvailable, OSError) as error:
        return warning("Spark", str(error), "needed only for the Spark source and the pipelines")
    return ok("Spark", f"PySpark and Java {release}")


# --- settings ------------------------------------------------------------------------------------

_RESERVED_FILES: Final = 200  # open files of a broker besides its connections


def check_settings(resolved: ResolvedConfig) -> Iterator[CheckResult]:
    config = resolved.config
    for text in resolved.warnings:
        yield warning("settings", text, "`escrowmq config` shows every setting and its origin")
    if not resolved.warnings:
        changed = sum(entry.is_changed for entry in resolved.entries())
        yield ok("settings", f"{changed} differ from their defaults")
    yield _check_bind_address(config)
    if config.security.acl_file is not None and config.security.is_acl_on:
        yield _check_accounts(config.security.acl_file)
    yield _check_open_files(config)


def _check_bind_address(config: Config) -> CheckResult:
    address = config.network.bind_address
    if is_loopback(address):
        return ok("access", f"only this machine can connect ({address})")
    if config.security.is_acl_on:
        if config.security.has_tls:
            return ok("access", f"{address}, with accounts and TLS")
        return warning(
            "access",
            f"{address}, with accounts but without TLS: messages can be read on the network",
            "set tls.server.certPath and tls.server.keyPath (docs/security.md)",
        )
    remedy = "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1"
    if config.security.insecure:
        detail = f"{address} is open to every machine that reaches it, because escrowInsecure=true"
        return warning("access", detail, remedy)
    return problem("access", f"{address} without accounts: serve refuses to start", remedy)


def _check_accounts(file: Path) -> CheckResult:
    # Imported here because it brings the whole server along.
    from escrowmq.server.security import load_acl_file

    try:
        rules = load_acl_file(file)
        mode = file.stat().st_mode
    except (EscrowError, OSError) as error:
        return problem("accounts", str(error), "correct the file (docs/security.md, Accounts)")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning("accounts", f"other users can read {file}", f"chmod 600 {file}")
    return ok("accounts", f"{len(rules.accounts)} in {file}")


def _check_open_files(config: Config) -> CheckResult:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.network.connections_max + _RESERVED_FILES
    if hard_limit != resource.RLIM_INFINITY and hard_limit < needed:
        return warning(
            "open files",
            f"the limit is {hard_limit}, too low for "
            f"escrowConnectionsMax={config.network.connections_max}",
            f"ulimit -Hn {needed}, or LimitNOFILE={needed} in the systemd unit",
        )
    return ok("open files", "the limit is high enough for escrowConnectionsMax")


# --- the data directory --------------------------------------------------------------------------


def check_directory(config: Config) -> Iterator[tuple[CheckResult, bool]]:
    """Yield each result with whether it shows that a broker is running on the directory."""
    root = Path(config.store.root_dir)
    if not root.exists():
        yield _check_can_create(root), False
        return
    for directory in (root, *sorted(root.glob("broker-*"))):  # --brokers N has one for each
        if directory.is_dir():
            yield _check_data_directory(directory)
    yield _check_disk_space(root, config), False


def _check_can_create(root: Path) -> CheckResult:
    parent = next(path for path in root.absolute().parents if path.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return ok("data", f"{root} does not exist yet; the first start creates it")
    return problem(
        "data",
        f"{root} does not exist, and this user cannot write to {parent}",
        _ownership_remedy(parent),
    )


def _check_data_directory(directory: Path) -> tuple[CheckResult, bool]:
    subject = f"data {directory.name}"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        detail = f"this user cannot write to {directory}"
        return problem(subject, detail, _ownership_remedy(directory)), False
    disk = RealDisk(directory)
    if disk.exists(LOCK_PATH):
        try:
            disk.lock(LOCK_PATH, b"lock").release()
        except StoreLocked:
            return ok(subject, f"{directory}: a broker is running on it"), True
        except StoreError as error:
            return problem(subject, str(error), _ownership_remedy(directory)), False
    if disk.exists(ABORT_PATH):
        return (
            warning(
                subject,
                f"{directory}: its broker was not shut down properly",
                "the next start repairs it; `escrowmq store check` shows what it will find",
            ),
            False,
        )
    if damage := log_ages.find_damage(disk):
        return (
            warning(
                subject,
                f"{directory}: {log_ages.AGES_PATH} {damage}: {log_ages.WITHOUT_AGES}",
                "check the disk; `escrowmq store check` looks at everything else, and the next "
                "start writes the file anew",
            ),
            False,
        )
    return ok(subject, f"{directory}: no broker is running on it"), False


def _ownership_remedy(directory: Path) -> str:
    return f"give the broker's user write access: chown -R USER {directory}"


_DISK_REMEDY: Final = "free disk space, use a larger disk, or reduce fileReservedTime"


def _check_disk_space(root: Path, config: Config) -> CheckResult:
    try:
        usage = RealDisk(root).usage()
    except StoreError as error:
        return problem("disk", str(error), "repair the file system")
    detail = f"{usage.used_ratio:.0%} used, {usage.free_bytes / (1 << 30):.1f} GiB free"
    expire_ratio = config.store.force_expire_percent / 100
    refuse_ratio = config.store.refuse_percent / 100
    if usage.used_ratio >= refuse_ratio:
        detail += f": messages are refused above {refuse_ratio:.0%}"
        return problem("disk", detail, _DISK_REMEDY)
    if usage.used_ratio >= expire_ratio:
        detail += f": above {expire_ratio:.0%} old messages are deleted early"
        return warning("disk", detail, _DISK_REMEDY)
    return ok("disk", detail)


# --- ports ---------------------------------------------------------------------------------------


def check_ports(config: Config, *, is_running: bool) -> Iterator[CheckResult]:
    """Check that the ports are free, or in use if a broker is running on the data directory."""
    ports = {
        "listenPort": config.network.listen_port,
        "escrowNamesrvPort": config.namesrv.namesrv_port,
    }
    for setting, port in ports.items():
        subject = f"port {port}"
        if port == 0:
            yield ok(subject, f"{setting}: any free port")
            continue
        bind_error = _bind_error(config.network.bind_address, port)
        if bind_error is None and is_running:
            yield warning(
                subject,
                f"{setting}: not in use, although a broker is running on the data directory",
                "it is still starting, or was started with other settings: compare "
                "`escrowmq config`",
            )
        elif bind_error is None:
            yield ok(subject, f"{setting} is free")
        elif is_running:
            yield ok(subject, f"{setting} is in use, because a broker is running here")
        else:
            yield problem(
                subject,
                f"{setting}: {bind_error}, and no broker is running on the data directory",
                f"stop the program that uses it (ss -ltnp 'sport = :{port}'), or change {setting}",
            )


def _bind_error(host: str, port: int) -> str | None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- the cluster ---------------------------------------------------------------------------------

_DISK_WARNING_RATIO: Final = 0.85
MAX_CLOCK_SKEW_MS: Final = 5_000


def check_cluster(cluster: Cluster, clock: Clock | None = None) -> Iterator[CheckResult]:
    """Check every name server, then every broker that they know."""
    reachable = []
    for address in cluster.servers:
        result = _check_name_server(cluster, address)
        yield result
        if result.level is CheckLevel.OK:
            reachable.append(address)
    if not reachable:
        return
    try:
        brokers = cluster.brokers()
    except EscrowError as error:
        yield problem(
            "brokers",
            error_text(error),
            "start one with `escrowmq serve`; on another machine, set namesrvAddr to this address",
        )
        return
    for broker in brokers:
        yield from _check_broker(cluster, broker, clock or SystemClock())


def _check_name_server(cluster: Cluster, address: str) -> CheckResult:
    subject = f"name server {address}"
    try:
        cluster.connection(address).call(RequestCode.GET_BROKER_CLUSTER_INFO)
    except EscrowError as error:
        return problem(subject, error_text(error), _connection_remedy(error))
    return ok(subject, "responds")


def _connection_remedy(error: EscrowError) -> str:
    if isinstance(error, RequestRefused) and error.code == ResponseCode.NO_PERMISSION:
        return "give an account: --credentials FILE, or $ESCROWMQ_ACCESS_KEY and its secret key"
    return "start it with `escrowmq serve`, or give its address with -n; with TLS, add --tls"


def _check_broker(cluster: Cluster, broker: BrokerAddress, clock: Clock) -> Iterator[CheckResult]:
    subject = f"broker {printable(broker.name)}"
    checks = (
        _check_runtime,
        _check_access,
        _check_transactions,
        _check_groups,
        partial(_check_dead_letters, cluster, broker),
    )
    try:
        connection = cluster.connection(broker.address)
        for check in checks:
            try:
                yield from check(connection, subject, clock)
            except UnknownRequest:
                continue  # Apache RocketMQ has no such request
    except RequestRefused as error:
        yield problem(subject, f"{broker.address}: {error_text(error)}", _connection_remedy(error))
    except EscrowError as error:
        yield problem(
            subject,
            error_text(error),
            "look at its log; if it registers a wrong address, set brokerIP1",
        )


def _check_runtime(connection: SyncConnection, subject: str, clock: Clock) -> Iterator[CheckResult]:
    runtime = broker_runtime(connection)
    now_ms = clock.now_ms()
    version, seconds = runtime.get("brokerVersionDesc", "?"), uptime_s(runtime)
    if runtime.get("brokerActive", "true") != "true":
        yield problem(
            subject,
            f"{connection.address} refuses messages: its disk is full or has failed",
            "look at its log and free disk space; restart it after a disk failure",
        )
    else:
        uptime = format_rough_duration(seconds * 1000)
        path = runtime.get("escrowRequestPath")  # an Apache broker has none
        path_text = f", path: {printable(path)}" if path else ""
        yield ok(
            subject, f"{connection.address} responds, {printable(version)}, up {uptime}{path_text}"
        )
    used_ratio = disk_used_ratio(runtime)
    if used_ratio is not None and used_ratio >= _DISK_WARNING_RATIO:
        yield warning(subject, f"its disk is {used_ratio:.0%} full", _DISK_REMEDY)
    damage_count = int(runtime.get("escrowDamageFound") or 0)
    if damage_count:
        yield problem(
            subject,
            f"it has found damage in its files {_count_text(damage_count, 'time')} since its start",
            'look for "damage found" in its log: it says where, and whether something is lost; '
            "check the disk, see docs/operating.md",
        )
    yield from _check_delayed_messages(runtime, subject)
    yield from _check_clock(runtime, seconds, now_ms, subject)


def _check_delayed_messages(runtime: dict[str, str], subject: str) -> Iterator[CheckResult]:
    """Report delayed messages that the broker cannot deliver. Apache RocketMQ does not say."""
    set_aside, lost = (
        int(runtime.get(name) or 0) for name in ("escrowDelayedSetAside", "escrowDelayedLost")
    )
    if set_aside:
        yield warning(
            subject,
            f"{_count_text(set_aside, 'delayed message')} could not be delivered",
            'look in its log for "delayed message set aside"; each is tried again every minute',
        )
    if lost:
        yield problem(
            subject,
            f"{_count_text(lost, 'delayed message')} lost since its start",
            'look in its log for "delayed message lost"; escrowmq store check shows damage',
        )


_CLOCK_REMEDY: Final = (
    "run NTP (chrony, systemd-timesyncd) on both: delays, timers and --to TIME depend on it"
)


def _check_clock(
    runtime: dict[str, str], uptime_seconds: int, now_ms: int, subject: str
) -> Iterator[CheckResult]:
    """Compare clocks, and report what the broker has noticed about its own."""
    # Apache RocketMQ reports its start time, and its uptime in whole seconds.
    booted_ms = int(runtime.get("bootTimestamp") or 0)
    broker_ms = int(runtime.get("escrowWallTimestamp") or 0)
    if not broker_ms and booted_ms:
        broker_ms = booted_ms + uptime_seconds * 1000
    skew_ms = now_ms - broker_ms
    if not broker_ms:
        yield ok(subject, "does not report its time")
    elif abs(skew_ms) <= MAX_CLOCK_SKEW_MS:
        yield ok(subject, "its clock agrees with this machine's clock")
    else:
        direction = "behind" if skew_ms > 0 else "ahead of"
        yield problem(
            subject,
            f"its clock is {format_rough_duration(abs(skew_ms))} {direction} this machine's clock",
            _CLOCK_REMEDY,
        )
    jumps, change_ms, ahead_ms = (
        int(runtime.get(name) or 0)
        for name in ("escrowClockJumps", "escrowClockChangeAtStart", "escrowStoredAhead")
    )
    if change_ms:
        direction = "forwards" if change_ms > 0 else "back"
        yield warning(
            subject,
            f"when it started, its clock had been set {direction} by "
            f"{format_rough_duration(abs(change_ms))} since it ran last",
            "nothing is deleted or stranded because of it; check which of the two times was right",
        )
        jumps -= 1
    if jumps > 0:
        yield warning(
            subject,
            f"its clock was set {_count_text(jumps, 'time')} since it started",
            _CLOCK_REMEDY,
        )
    if ahead_ms > MAX_CLOCK_SKEW_MS:
        yield warning(
            subject,
            f"its newest message was stored {format_rough_duration(ahead_ms)} in the future",
            "the clock was wrong then, or is wrong now; see docs/operating.md, A clock that jumps",
        )


def _check_access(connection: SyncConnection, subject: str, clock: Clock) -> Iterator[CheckResult]:
    settings = broker_settings(connection)
    address = settings.get("bindAddress", "")
    switches = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    has_accounts = any(settings.get(name) == "true" for name in switches)
    if address and not is_loopback(address) and not has_accounts:
        yield warning(
            subject,
            f"listens on {address} and accepts every client without an account",
            "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1",
        )


# --- transactions and groups of a broker ---------------------------------------------------------

MAX_OPEN_MS: Final = 3_600_000
MAX_LAG: Final = 10_000
_LIST_LIMIT: Final = 1_000
_MAX_SHOWN_GROUPS: Final = 10  # of those without members, and of those that are slow


def _check_transactions(
    connection: SyncConnection, subject: str, clock: Clock
) -> Iterator[CheckResult]:
    stranded = _list_transactions(
        connection, ListTransactions(state="stranded", count_max=_LIST_LIMIT)
    )
    if stranded:
        yield problem(
            subject,
            f"{_transactions_text(stranded)} stranded: the broker does not check them any more",
            "escrowmq transaction list --state stranded; then commit, rollback or resume",
        )
    old = _list_transactions(
        connection,
        ListTransactions(state="open", older_than_ms=MAX_OPEN_MS, count_max=_LIST_LIMIT),
    )
    if old:
        age = format_rough_duration(clock.now_ms() - min(entry.parked_at for entry in old))
        yield warning(
            subject,
            f"{_transactions_text(old)} open for more than an hour, the oldest for {age}",
            "is the producer running, and does it answer checks? escrowmq transaction explain "
            f"{printable(old[0].transaction_id)}",
        )
    if not stranded and not old:
        yield ok(subject, "no transaction is stranded or open for more than an hour")


def _list_transactions(
    connection: SyncConnection, request: ListTransactions
) -> list[TransactionEntry]:
    body = connection.call(RequestCode.LIST_TRANSACTIONS, request).body
    return decode_body(TransactionList, body).transactions


def _transactions_text(entries: list[TransactionEntry]) -> str:
    if len(entries) == 1:
        return "1 transaction is"
    return f"{len(entries)}{' or more' if len(entries) >= _LIST_LIMIT else ''} transactions are"


def _check_groups(connection: SyncConnection, subject: str, clock: Clock) -> Iterator[CheckResult]:
    lags = {
        group: total_lag(progress.values())
        for group, progress in all_progress(connection).items()
        if not is_system_group(group)
    }
    behind = sorted((group for group in lags if lags[group]), key=lambda group: -lags[group])
    connected = consumer_connections(connection, behind)
    absent = [group for group in behind if group not in connected]
    slow = [group for group in behind if group in connected and lags[group] > MAX_LAG]
    for group in absent[:_MAX_SHOWN_GROUPS]:
        yield warning(
            subject,
            f"group {printable(group)} has {_count_text(lags[group], 'unread message')} and no "
            "connected member",
            "start its consumers; if it is not used any more: escrowmq group delete "
            f"{printable(group)}",
        )
    for group in slow[:_MAX_SHOWN_GROUPS]:
        yield warning(
            subject,
            f"group {printable(group)} is {lags[group]} messages behind",
            "start more consumers, up to one per queue: escrowmq group lag "
            f"{printable(group)} --watch",
        )
    more = len(absent[_MAX_SHOWN_GROUPS:]) + len(slow[_MAX_SHOWN_GROUPS:])
    if more:
        yield warning(subject, f"{more} more groups are behind", "escrowmq group lag")
    if not absent and not slow:
        yield ok(subject, f"{_count_text(len(lags), 'group')}, none far behind")


_MAX_EXAMINED_DEAD_LETTERS: Final = 500  # of a queue; the newest
_MAX_SHOWN_CAUSES: Final = 3


def _check_dead_letters(
    cluster: Cluster, broker: BrokerAddress, connection: SyncConnection, subject: str, clock: Clock
) -> Iterator[CheckResult]:
    queues = dead_letter_queues(connection)
    for group, queues_of_group in groupby(queues, key=lambda queue: queue.group):
        letters: list[DeadLetter] = []
        is_complete = True
        for queue in queues_of_group:
            begin = max(queue.cursor, queue.max_offset - _MAX_EXAMINED_DEAD_LETTERS)
            is_complete = is_complete and begin == queue.cursor
            letters += read_dead_letters(cluster, broker, replace(queue, cursor=begin))
        if letters:
            name, count = printable(group), _count_text(len(letters), "open dead letter")
            age_ms = clock.now_ms() - min(letter.message.stored_ms for letter in letters)
            age = f", the oldest for {format_rough_duration(age_ms)}" if is_complete else ""
            yield warning(
                subject,
                f"group {name} has {'' if is_complete else 'at least '}{count}{age}: "
                f"{_causes_text(letters)}",
                f"escrowmq message dead list --group {name}; when the cause is removed, resend "
                "them: escrowmq message dead resend",
            )


def _causes_text(letters: Iterable[DeadLetter]) -> str:
    causes = Counter(letter.error_type or letter.cause for letter in letters).most_common()
    shown = [f"{count} x {printable(cause)}" for cause, count in causes[:_MAX_SHOWN_CAUSES]]
    others = len(causes) - len(shown)
    return ", ".join([*shown, f"and {_count_text(others, 'other cause')}"] if others else shown)
