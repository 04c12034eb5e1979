"""One thing that `escrowmq doctor` looked at: how it is, and what to do about it.

What may be wrong with a cluster: servers, disks, clocks, transactions, groups.

What may be wrong with this machine: Python, packages, ports, the data directory.

What may be wrong with the settings of a server.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from escrowmq.cli.call import (
    BrokerAddress,
    SyncConnection,
    error_text,
    find_cluster,
    master_brokers,
    parse_name_servers,
)
from escrowmq.cli.commands.broker import disk_used_ratio, uptime_s
from escrowmq.cli.figures import (
    all_progress,
    broker_runtime,
    broker_settings,
    consumer_connections,
    topic_configs,
    topic_offsets,
    total_lag,
)
from escrowmq.cli.rendering import printable
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
from escrowmq.message.names import DLQ_PREFIX, is_system_group
from escrowmq.parsing import format_rough_duration
from escrowmq.remoting.bodies import TransactionEntry, TransactionList, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ListTransactions
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import ABORT_PATH, LOCK_PATH


class CheckLevel(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but look after it
    PROBLEM = "problem"  # something does not work, or will not for long


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
    seen = list(results)
    width = max((len(one.subject) for one in seen), default=0)
    for one in seen:
        yield f"{_LEVEL_LABELS[one.level]}  {one.subject:<{width}}  {one.detail}"
        if one.remedy:
            yield f"{'':<{width + 11}}-> {one.remedy}"
    problems = sum(one.level is CheckLevel.PROBLEM for one in seen)
    warnings = sum(one.level is CheckLevel.WARNING for one in seen)
    if seen:
        yield ""
    if problems or warnings:
        yield f"{_count_text(problems, 'problem')}, {_count_text(warnings, 'warning')}"
    else:
        yield "nothing is wrong"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_TIMEOUT_S: Final = 5.0
MAX_CLOCK_SKEW_MS: Final = 5_000
MAX_OPEN_MS: Final = 3_600_000
MAX_LAG: Final = 10_000
_MAX_SHOWN_GROUPS: Final = 10  # groups of each kind


def check_cluster(namesrv: str, clock: Clock | None = None) -> Iterator[CheckResult]:
    reachable = []
    for address in parse_name_servers(namesrv):
        checkup = _check_name_server(address)
        yield checkup
        if not checkup.remedy:
            reachable.append(address)
    if not reachable:
        return
    try:
        brokers = master_brokers(find_cluster(";".join(reachable), timeout_s=_TIMEOUT_S))
    except EscrowError as error:
        yield problem(
            "brokers",
            error_text(error),
            "start one: escrowmq serve; one that runs elsewhere needs this address as namesrvAddr",
        )
        return
    for broker in brokers:
        yield from _check_broker(broker, clock or SystemClock())


def _check_name_server(address: str) -> CheckResult:
    what = f"name server {address}"
    try:
        with SyncConnection(address, timeout_s=_TIMEOUT_S) as caller:
            caller.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    except EscrowError as error:
        return problem(what, error_text(error), _connection_remedy(error))
    return ok(what, "answers")


def _connection_remedy(error: EscrowError) -> str:
    if isinstance(error, RequestRefused) and error.code == ResponseCode.NO_PERMISSION:
        return "show who you are: --credentials FILE, or $ESCROWMQ_ACCESS_KEY and its secret"
    return "start it (escrowmq serve), or say where it is: -n HOST:PORT; with TLS: --tls"


def _check_broker(broker: BrokerAddress, clock: Clock) -> Iterator[CheckResult]:
    what = f"broker {printable(broker.name)}"
    try:
        with SyncConnection(broker.address, timeout_s=_TIMEOUT_S) as caller:
            for examine in (
                _check_runtime,
                _check_access,
                _check_transactions,
                _check_groups,
                _check_dead_letters,
            ):
                try:
                    yield from examine(caller, what, clock)
                except UnknownRequest:
                    continue  # Apache's: it has nothing of the kind
    except RequestRefused as error:
        yield problem(what, f"{broker.address}: {error_text(error)}", _connection_remedy(error))
    except EscrowError as error:
        yield problem(
            what,
            error_text(error),
            "look at its log; if it listens on another address than it tells, set brokerIP1",
        )


def _check_runtime(connection: SyncConnection, subject: str, clock: Clock) -> Iterator[CheckResult]:
    table = broker_runtime(connection)
    now_ms = clock.now_ms()
    version, up = table.get("brokerVersionDesc", "?"), uptime_s(table)
    if table.get("brokerActive", "true") != "true":
        yield problem(
            subject,
            f"{connection.address} takes no messages: its disk is full, or has failed",
            "look at its log; make room; after a failed disk restart it",
        )
    else:
        yield ok(
            subject, f"{connection.address} answers, {printable(version)}, up {_uptime_text(up)}"
        )
    yield from _check_broker_disk(table, subject)
    yield _check_clock(table, up, now_ms, subject)


def _uptime_text(seconds: int) -> str:
    return format_rough_duration(seconds * 1000)


def _check_broker_disk(table: dict[str, str], subject: str) -> Iterator[CheckResult]:
    used = disk_used_ratio(table)
    if used is not None and used >= 0.85:
        text = f"its disk is {used:.0%} full"
        yield warning(subject, text, "make room, a larger disk, or a shorter fileReservedTime")


def _check_clock(table: dict[str, str], uptime_s: int, now_ms: int, subject: str) -> CheckResult:
    """It says when it started and how long ago, in whole seconds."""
    booted_ms = int(table.get("bootTimestamp") or 0)
    if not booted_ms:
        return ok(subject, "does not say what time it is")
    skew_ms = now_ms - (booted_ms + uptime_s * 1000)
    if abs(skew_ms) <= MAX_CLOCK_SKEW_MS:
        return ok(subject, "its clock agrees with ours")
    order = "behind" if skew_ms > 0 else "ahead of"
    return problem(
        subject,
        f"its clock is {format_rough_duration(abs(skew_ms))} {order} ours",
        "run NTP (chrony, systemd-timesyncd) on both: delays, expiry and --to TIME go by clocks",
    )


def _check_access(connection: SyncConnection, subject: str, clock: Clock) -> Iterator[CheckResult]:
    told = broker_settings(connection)
    address = told.get("bindAddress", "")
    names = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    is_guarded = any(told.get(name) == "true" for name in names)
    if address and not is_loopback(address) and not is_guarded:
        yield warning(
            subject,
            f"listens on {address} and asks nobody who he is",
            "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1",
        )


# --- what waits ----------------------------------------------------------------------------------


def _check_transactions(
    connection: SyncConnection, subject: str, clock: Clock
) -> Iterator[CheckResult]:
    stranded = _list_transactions(connection, ListTransactions(state="stranded", count_max=1_000))
    if stranded:
        yield problem(
            subject,
            f"{_transactions_text(stranded)} stranded: nobody is asked about them any more",
            "escrowmq transaction list --state stranded; then commit, rollback or resume",
        )
    wanted = ListTransactions(state="open", older_than_ms=MAX_OPEN_MS, count_max=1_000)
    old = _list_transactions(connection, wanted)
    if old:
        age = format_rough_duration(clock.now_ms() - min(entry.parked_at for entry in old))
        yield warning(
            subject,
            f"{_transactions_text(old)} open for more than an hour, the oldest for {age}",
            "is the producer up, and does it answer checks? escrowmq transaction explain "
            f"{printable(old[0].transaction_id)}",
        )
    if not stranded and not old:
        yield ok(subject, "no transaction is stranded, none is old")


def _list_transactions(
    connection: SyncConnection, request: ListTransactions
) -> list[TransactionEntry]:
    body = connection.call(RequestCode.LIST_TRANSACTIONS, request).body
    return decode_body(TransactionList, body).transactions


def _transactions_text(entries: list[TransactionEntry]) -> str:
    if len(entries) == 1:
        return "1 transaction is"
    return f"{len(entries)}{' or more' if len(entries) >= 1_000 else ''} transactions are"


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
            f"group {printable(group)} has not read {lags[group]} messages, "
            "and nobody of it is connected",
            f"start its consumers; if it is given up: escrowmq group delete {printable(group)}",
        )
    for group in slow[:_MAX_SHOWN_GROUPS]:
        yield warning(
            subject,
            f"group {printable(group)} is {lags[group]} messages behind",
            f"more consumers, up to one per queue: escrowmq group lag {printable(group)} --watch",
        )
    more = len(absent[_MAX_SHOWN_GROUPS:]) + len(slow[_MAX_SHOWN_GROUPS:])
    if more:
        yield warning(subject, f"{more} more groups are behind", "escrowmq group lag")
    if not absent and not slow:
        yield ok(subject, f"{len(lags)} groups, none far behind")


def _check_dead_letters(
    connection: SyncConnection, subject: str, clock: Clock
) -> Iterator[CheckResult]:
    topics = [name for name in topic_configs(connection) if name.startswith(DLQ_PREFIX)]
    for topic, count in _message_counts(connection, topics):
        group = printable(topic.removeprefix(DLQ_PREFIX))
        yield warning(
            subject,
            f"group {group} has {count} dead letters: it failed on them again and again",
            f"escrowmq message tail '{printable(topic)}' --from earliest --no-follow",
        )


def _message_counts(connection: SyncConnection, topics: list[str]) -> Iterable[tuple[str, int]]:
    for topic, offsets in topic_offsets(connection, topics).items():
        count = sum(one.max_offset - one.min_offset for one in offsets.values())
        if count:
            yield topic, count


_MIN_PYTHON: Final = (3, 11)
_REQUIRED_PACKAGES: Final = ("click", "lz4", "msgspec", "yaml", "rich")
_EXTRAS: Final = {
    "spark": ("pyspark", "pyarrow"),
    "sql": ("sqlalchemy",),
    "django": ("django",),
    "otel": ("opentelemetry",),
    "fast": ("isal",),
}


# --- Python --------------------------------------------------------------------------------------


def check_python() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _MIN_PYTHON:
        yield problem("Python", version, "install Python 3.11 or newer, and escrowmq with it")
    else:
        yield ok("Python", f"{version}, escrowmq {importlib.metadata.version('escrowmq')}")
    missing = [name for name in _REQUIRED_PACKAGES if find_spec(name) is None]
    if missing:
        yield problem("packages", f"{', '.join(missing)} missing", "pip install escrowmq")
    if find_spec("uvloop") is None:
        yield problem("packages", "uvloop is missing: serve cannot start", "pip install escrowmq")
    there = [extra for extra, names in _EXTRAS.items() if all(map(find_spec, names))]
    absent = [extra for extra in _EXTRAS if extra not in there]
    detail = ", ".join(there) or "none"
    if absent:
        detail += f"; not installed: {', '.join(absent)} (pip install escrowmq[NAME] if needed)"
    yield ok("extras", detail)
    if "spark" in there:
        yield _check_spark()


def _check_spark() -> CheckResult:
    from escrowmq.spark.session import check_java, check_pyspark

    try:
        check_pyspark()
        release = check_java()
    except (SparkNotAvailable, OSError) as error:
        return warning("Spark", str(error), "without it everything works but the Spark source")
    return ok("Spark", f"PySpark and Java {release}")


# --- ports ---------------------------------------------------------------------------------------


def check_ports(config: Config, *, is_running: bool) -> Iterator[CheckResult]:
    """A port in use is as it should be, if a broker runs on the directory."""
    ports = {
        "listenPort": config.network.listen_port,
        "escrowNamesrvPort": config.namesrv.namesrv_port,
    }
    for name, port in ports.items():
        what = f"port {port}"
        why = _bind_error(config.network.bind_address, port)
        if port == 0:
            yield ok("port 0", f"{name}: any that is free")
        elif why is None and is_running:
            yield warning(
                what,
                f"{name}: nobody listens, though a broker runs on the data directory",
                "it was started with other settings, or still starts: compare escrowmq config",
            )
        elif why is None:
            yield ok(what, f"{name} is free")
        elif is_running:
            yield ok(what, f"{name} is in use, as a broker runs here")
        else:
            yield problem(
                what,
                f"{name}: {why}, and no broker runs on the data directory",
                f"stop who has it (ss -ltnp 'sport = :{port}'), or set another {name}",
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


# --- the data directory --------------------------------------------------------------------------


def check_directory(config: Config) -> Iterator[tuple[CheckResult, bool]]:
    """And whether a broker runs on it."""
    root = Path(config.store.root_dir)
    if not root.exists():
        yield _check_can_create(root), False
        return
    for directory in (root, *sorted(root.glob("broker-*"))):
        if directory.is_dir():
            yield _check_data_directory(directory)
    yield _check_disk_space(root, config), False


def _check_can_create(root: Path) -> CheckResult:
    parent = next(path for path in root.absolute().parents if path.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return ok("data", f"{root} is not there; the first start makes it")
    return problem(
        "data", f"{root} is not there, and {parent} cannot be written", _ownership_remedy(parent)
    )


def _ownership_remedy(directory: Path) -> str:
    return f"let the user of the broker write there: chown -R USER {directory}"


def _check_data_directory(directory: Path) -> tuple[CheckResult, bool]:
    what = f"data {directory.name}"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return problem(
            what, f"{directory} cannot be written by this user", _ownership_remedy(directory)
        ), False
    disk = RealDisk(directory)
    if disk.exists(LOCK_PATH):
        try:
            disk.lock(LOCK_PATH, b"lock").release()
        except StoreLocked:
            return ok(what, f"{directory}: a broker runs on it"), True
        except StoreError as error:
            return problem(what, str(error), _ownership_remedy(directory)), False
    if disk.exists(ABORT_PATH):
        return (
            warning(
                what,
                f"{directory}: its broker did not stop in order",
                "the next start mends it; escrowmq store check says what it will find",
            ),
            False,
        )
    return ok(what, f"{directory}: nobody runs on it"), False


def _check_disk_space(root: Path, config: Config) -> CheckResult:
    try:
        usage = RealDisk(root).usage()
    except StoreError as error:
        return problem("disk", str(error), "mend the file system")
    text = f"{usage.used_ratio:.0%} used, {usage.free_bytes / (1 << 30):.1f} GiB free"
    limit = config.store.force_expire_percent / 100
    refuse = config.store.refuse_percent / 100
    remedy = "make room, a larger disk, or a shorter fileReservedTime"
    if usage.used_ratio >= refuse:
        return problem("disk", f"{text}: sends are refused from {refuse:.0%} on", remedy)
    if usage.used_ratio >= limit:
        return warning("disk", f"{text}: from {limit:.0%} on old messages go early", remedy)
    return ok("disk", text)


_RESERVED_FILES: Final = 200  # beside connections


def check_settings(resolved: ResolvedConfig) -> Iterator[CheckResult]:
    config = resolved.config
    for text in resolved.warnings:
        yield warning("settings", text, "escrowmq config shows every setting and where it is from")
    if not resolved.warnings:
        changed = sum(entry.is_changed for entry in resolved.entries())
        yield ok("settings", f"{changed} not at their defaults")
    yield _check_bind_address(config)
    if config.security.acl_file is not None and config.security.is_acl_on:
        yield _check_accounts(config.security.acl_file)
    yield _check_open_files(config)


def _check_bind_address(config: Config) -> CheckResult:
    address = config.network.bind_address
    if is_loopback(address):
        return ok("access", f"serves this machine alone ({address})")
    if config.security.is_acl_on:
        if config.security.has_tls:
            return ok("access", f"{address}, with accounts and TLS")
        return warning(
            "access",
            f"{address}, with accounts but without TLS: who reads the wire reads messages",
            "set tls.server.certPath and tls.server.keyPath (docs/security.md)",
        )
    remedy = "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1"
    if config.security.insecure:
        text = f"{address} is open to every machine that reaches it, as escrowInsecure says"
        return warning("access", text, remedy)
    return problem("access", f"{address} without accounts: serve refuses to start", remedy)


def _check_accounts(file: Path) -> CheckResult:
    # Not before: it brings the server along, which is not looked at otherwise.
    from escrowmq.server.security import load_acl_file

    try:
        rules = load_acl_file(file)
        mode = file.stat().st_mode
    except (EscrowError, OSError) as error:
        return problem("accounts", str(error), "mend the file (docs/security.md, Accounts)")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning("accounts", f"{file} can be read by others", f"chmod 600 {file}")
    return ok("accounts", f"{len(rules.accounts)} in {file}")


def _check_open_files(config: Config) -> CheckResult:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.network.connections_max + _RESERVED_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return warning(
            "open files",
            f"{hard} may be open, and escrowConnectionsMax={config.network.connections_max}",
            f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the unit",
        )
    return ok("open files", "enough for escrowConnectionsMax")
