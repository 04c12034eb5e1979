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

from escrowmq.broker.metadata import DLQ_PREFIX
from escrowmq.cli.call import BrokerPlace, Caller, addresses_of, find_cluster, masters_of, reason_of
from escrowmq.cli.commands.broker import disk_ratio, up_s
from escrowmq.cli.commands.transaction import duration_text
from escrowmq.cli.figures import (
    connections,
    is_own_group,
    lag_of,
    progress_of_all,
    runtime,
    settings,
    topic_configs,
    topic_offsets,
)
from escrowmq.cli.rendering import printable
from escrowmq.clock import Clock, SystemClock
from escrowmq.config import Config, Resolved
from escrowmq.config.loading import is_loopback
from escrowmq.errors import (
    EscrowError,
    RequestRefused,
    SparkMissing,
    StoreError,
    StoreLocked,
    UnknownRequest,
)
from escrowmq.remoting.bodies import TransactionEntry, TransactionList, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ListTransactions
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import ABORT_PATH, LOCK_PATH


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but look after it
    PROBLEM = "problem"  # something does not work, or will not for long


@dataclass(frozen=True, slots=True)
class Checkup:
    what: str
    level: Level
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "level": self.level.value,
            "detail": self.detail,
            "remedy": self.remedy or None,
        }


def ok(what: str, detail: str) -> Checkup:
    return Checkup(what, Level.OK, detail)


def warning(what: str, detail: str, remedy: str) -> Checkup:
    return Checkup(what, Level.WARNING, detail, remedy)


def problem(what: str, detail: str, remedy: str) -> Checkup:
    return Checkup(what, Level.PROBLEM, detail, remedy)


_MARKS: Final = {Level.OK: "ok     ", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}


def checkup_lines(checkups: Iterable[Checkup]) -> Iterator[str]:
    seen = list(checkups)
    width = max((len(one.what) for one in seen), default=0)
    for one in seen:
        yield f"{_MARKS[one.level]}  {one.what:<{width}}  {one.detail}"
        if one.remedy:
            yield f"{'':<{width + 11}}-> {one.remedy}"
    problems = sum(one.level is Level.PROBLEM for one in seen)
    warnings = sum(one.level is Level.WARNING for one in seen)
    if seen:
        yield ""
    if problems or warnings:
        yield f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"
    else:
        yield "nothing is wrong"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


_TIMEOUT_S: Final = 5.0
SKEW_MS_MAX: Final = 5_000
OPEN_MS_MAX: Final = 3_600_000
LAG_MAX: Final = 10_000
_SHOWN_MAX: Final = 10  # groups of each kind


def examine_cluster(namesrv: str, clock: Clock | None = None) -> Iterator[Checkup]:
    reachable = []
    for address in addresses_of(namesrv):
        checkup = _name_server(address)
        yield checkup
        if not checkup.remedy:
            reachable.append(address)
    if not reachable:
        return
    try:
        brokers = masters_of(find_cluster(";".join(reachable), timeout_s=_TIMEOUT_S))
    except EscrowError as error:
        yield problem(
            "brokers",
            reason_of(error),
            "start one: escrowmq serve; one that runs elsewhere needs this address as namesrvAddr",
        )
        return
    for broker in brokers:
        yield from _broker(broker, clock or SystemClock())


def _name_server(address: str) -> Checkup:
    what = f"name server {address}"
    try:
        with Caller(address, timeout_s=_TIMEOUT_S) as caller:
            caller.call(RequestCode.GET_BROKER_CLUSTER_INFO)
    except EscrowError as error:
        return problem(what, reason_of(error), _how_to_reach(error))
    return ok(what, "answers")


def _how_to_reach(error: EscrowError) -> str:
    if isinstance(error, RequestRefused) and error.code == ResponseCode.NO_PERMISSION:
        return "show who you are: --credentials FILE, or $ESCROWMQ_ACCESS_KEY and its secret"
    return "start it (escrowmq serve), or say where it is: -n HOST:PORT; with TLS: --tls"


def _broker(broker: BrokerPlace, clock: Clock) -> Iterator[Checkup]:
    what = f"broker {printable(broker.name)}"
    try:
        with Caller(broker.address, timeout_s=_TIMEOUT_S) as caller:
            for examine in (_running, _connection_checks, _transactions, _groups, _dead_letters):
                try:
                    yield from examine(caller, what, clock)
                except UnknownRequest:
                    continue  # Apache's: it has nothing of the kind
    except RequestRefused as error:
        yield problem(what, f"{broker.address}: {reason_of(error)}", _how_to_reach(error))
    except EscrowError as error:
        yield problem(
            what,
            reason_of(error),
            "look at its log; if it listens on another address than it tells, set brokerIP1",
        )


def _running(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    table = runtime(caller)
    now_ms = clock.now_ms()
    version, up = table.get("brokerVersionDesc", "?"), up_s(table)
    if table.get("brokerActive", "true") != "true":
        yield problem(
            what,
            f"{caller.address} takes no messages: its disk is full, or has failed",
            "look at its log; make room; after a failed disk restart it",
        )
    else:
        yield ok(what, f"{caller.address} answers, {printable(version)}, up {_since(up)}")
    yield from _disk(table, what)
    yield _clock(table, up, now_ms, what)


def _since(seconds: int) -> str:
    return duration_text(seconds * 1000)


def _disk(table: dict[str, str], what: str) -> Iterator[Checkup]:
    used = disk_ratio(table)
    if used is not None and used >= 0.85:
        text = f"its disk is {used:.0%} full"
        yield warning(what, text, "make room, a larger disk, or a shorter fileReservedTime")


def _clock(table: dict[str, str], up: int, now_ms: int, what: str) -> Checkup:
    """It says when it started and how long ago, in whole seconds."""
    booted_ms = int(table.get("bootTimestamp") or 0)
    if not booted_ms:
        return ok(what, "does not say what time it is")
    skew_ms = now_ms - (booted_ms + up * 1000)
    if abs(skew_ms) <= SKEW_MS_MAX:
        return ok(what, "its clock agrees with ours")
    order = "behind" if skew_ms > 0 else "ahead of"
    return problem(
        what,
        f"its clock is {duration_text(abs(skew_ms))} {order} ours",
        "run NTP (chrony, systemd-timesyncd) on both: delays, expiry and --to TIME go by clocks",
    )


def _connection_checks(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    told = settings(caller)
    address = told.get("bindAddress", "")
    names = ("aclEnable", "authenticationEnabled", "authorizationEnabled")
    is_guarded = any(told.get(name) == "true" for name in names)
    if address and not is_loopback(address) and not is_guarded:
        yield warning(
            what,
            f"listens on {address} and asks nobody who he is",
            "set aclEnable=true and escrowAclFile (docs/security.md), or listen on 127.0.0.1",
        )


# --- what waits ----------------------------------------------------------------------------------


def _transactions(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    stranded = _listed(caller, ListTransactions(state="stranded", count_max=1_000))
    if stranded:
        yield problem(
            what,
            f"{_many(stranded)} stranded: nobody is asked about them any more",
            "escrowmq transaction list --state stranded; then commit, rollback or resume",
        )
    wanted = ListTransactions(state="open", older_than_ms=OPEN_MS_MAX, count_max=1_000)
    old = _listed(caller, wanted)
    if old:
        age = duration_text(clock.now_ms() - min(entry.parked_at for entry in old))
        yield warning(
            what,
            f"{_many(old)} open for more than an hour, the oldest for {age}",
            "is the producer up, and does it answer checks? escrowmq transaction explain "
            f"{printable(old[0].transaction_id)}",
        )
    if not stranded and not old:
        yield ok(what, "no transaction is stranded, none is old")


def _listed(caller: Caller, wanted: ListTransactions) -> list[TransactionEntry]:
    body = caller.call(RequestCode.LIST_TRANSACTIONS, wanted).body
    return decode_body(TransactionList, body).transactions


def _many(entries: list[TransactionEntry]) -> str:
    if len(entries) == 1:
        return "1 transaction is"
    return f"{len(entries)}{' or more' if len(entries) >= 1_000 else ''} transactions are"


def _groups(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    lags = {
        group: lag_of(progress.values())
        for group, progress in progress_of_all(caller).items()
        if not is_own_group(group)
    }
    behind = sorted((group for group in lags if lags[group]), key=lambda group: -lags[group])
    connected = connections(caller, behind)
    absent = [group for group in behind if group not in connected]
    slow = [group for group in behind if group in connected and lags[group] > LAG_MAX]
    for group in absent[:_SHOWN_MAX]:
        yield warning(
            what,
            f"group {printable(group)} has not read {lags[group]} messages, "
            "and nobody of it is connected",
            f"start its consumers; if it is given up: escrowmq group delete {printable(group)}",
        )
    for group in slow[:_SHOWN_MAX]:
        yield warning(
            what,
            f"group {printable(group)} is {lags[group]} messages behind",
            f"more consumers, up to one per queue: escrowmq group lag {printable(group)} --watch",
        )
    more = len(absent[_SHOWN_MAX:]) + len(slow[_SHOWN_MAX:])
    if more:
        yield warning(what, f"{more} more groups are behind", "escrowmq group lag")
    if not absent and not slow:
        yield ok(what, f"{len(lags)} groups, none far behind")


def _dead_letters(caller: Caller, what: str, clock: Clock) -> Iterator[Checkup]:
    topics = [name for name in topic_configs(caller) if name.startswith(DLQ_PREFIX)]
    for topic, count in _counts(caller, topics):
        group = printable(topic.removeprefix(DLQ_PREFIX))
        yield warning(
            what,
            f"group {group} has {count} dead letters: it failed on them again and again",
            f"escrowmq message tail '{printable(topic)}' --from earliest --no-follow",
        )


def _counts(caller: Caller, topics: list[str]) -> Iterable[tuple[str, int]]:
    for topic, offsets in topic_offsets(caller, topics).items():
        count = sum(one.max_offset - one.min_offset for one in offsets.values())
        if count:
            yield topic, count


_PYTHON_MIN: Final = (3, 11)
_NEEDED: Final = ("click", "lz4", "msgspec", "yaml", "rich")
_EXTRAS: Final = {
    "spark": ("pyspark", "pyarrow"),
    "sql": ("sqlalchemy",),
    "django": ("django",),
    "otel": ("opentelemetry",),
    "fast": ("isal",),
}


# --- Python --------------------------------------------------------------------------------------


def examine_python() -> Iterator[Checkup]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _PYTHON_MIN:
        yield problem("Python", version, "install Python 3.11 or newer, and escrowmq with it")
    else:
        yield ok("Python", f"{version}, escrowmq {importlib.metadata.version('escrowmq')}")
    missing = [name for name in _NEEDED if find_spec(name) is None]
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
        yield _spark()


def _spark() -> Checkup:
    from escrowmq.spark.data_source import check_java, check_pyspark

    try:
        check_pyspark()
        release = check_java()
    except (SparkMissing, OSError) as error:
        return warning("Spark", str(error), "without it everything works but the Spark source")
    return ok("Spark", f"PySpark and Java {release}")


# --- ports ---------------------------------------------------------------------------------------


def examine_ports(config: Config, *, is_running: bool) -> Iterator[Checkup]:
    """A port in use is as it should be, if a broker runs on the directory."""
    ports = {
        "listenPort": config.network.listen_port,
        "escrowNamesrvPort": config.namesrv.namesrv_port,
    }
    for name, port in ports.items():
        what = f"port {port}"
        why = _why_not(config.network.bind_address, port)
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


def _why_not(host: str, port: int) -> str | None:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- the data directory --------------------------------------------------------------------------


def examine_directory(config: Config) -> Iterator[tuple[Checkup, bool]]:
    """And whether a broker runs on it."""
    root = Path(config.store.root_dir)
    if not root.exists():
        yield _can_be_made(root), False
        return
    for directory in (root, *sorted(root.glob("broker-*"))):
        if directory.is_dir():
            yield _directory(directory)
    yield _space(root, config), False


def _can_be_made(root: Path) -> Checkup:
    parent = next(path for path in root.absolute().parents if path.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return ok("data", f"{root} is not there; the first start makes it")
    return problem("data", f"{root} is not there, and {parent} cannot be written", _mine(parent))


def _mine(directory: Path) -> str:
    return f"let the user of the broker write there: chown -R USER {directory}"


def _directory(directory: Path) -> tuple[Checkup, bool]:
    what = f"data {directory.name}"
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return problem(what, f"{directory} cannot be written by this user", _mine(directory)), False
    disk = RealDisk(directory)
    if disk.exists(LOCK_PATH):
        try:
            disk.lock(LOCK_PATH, b"lock").release()
        except StoreLocked:
            return ok(what, f"{directory}: a broker runs on it"), True
        except StoreError as error:
            return problem(what, str(error), _mine(directory)), False
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


def _space(root: Path, config: Config) -> Checkup:
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


_OWN_FILES: Final = 200  # beside connections


def examine_settings(resolved: Resolved) -> Iterator[Checkup]:
    config = resolved.config
    for text in resolved.warnings:
        yield warning("settings", text, "escrowmq config shows every setting and where it is from")
    if not resolved.warnings:
        changed = sum(entry.is_changed for entry in resolved.entries())
        yield ok("settings", f"{changed} not at their defaults")
    yield _listen_check(config)
    if config.security.acl_file is not None and config.security.checks_access:
        yield _accounts(config.security.acl_file)
    yield _files(config)


def _listen_check(config: Config) -> Checkup:
    address = config.network.bind_address
    if is_loopback(address):
        return ok("access", f"serves this machine alone ({address})")
    if config.security.checks_access:
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


def _accounts(file: Path) -> Checkup:
    # Not before: it brings the server along, which is not looked at otherwise.
    from escrowmq.server.security import rules_of

    try:
        rules = rules_of(file)
        mode = file.stat().st_mode
    except (EscrowError, OSError) as error:
        return problem("accounts", str(error), "mend the file (docs/security.md, Accounts)")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        return warning("accounts", f"{file} can be read by others", f"chmod 600 {file}")
    return ok("accounts", f"{len(rules.accounts)} in {file}")


def _files(config: Config) -> Checkup:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.network.connections_max + _OWN_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return warning(
            "open files",
            f"{hard} may be open, and escrowConnectionsMax={config.network.connections_max}",
            f"ulimit -Hn {wanted}, or LimitNOFILE={wanted} in the unit",
        )
    return ok("open files", "enough for escrowConnectionsMax")
