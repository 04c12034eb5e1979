"""What may be wrong with this machine: Python, packages, ports, the data directory."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from escrowmq.cli.checkup import Checkup, ok, problem, warning
from escrowmq.config import Config
from escrowmq.errors import SparkMissing, StoreError, StoreLocked
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import ABORT_PATH, LOCK_PATH

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
    from escrowmq.spark.session import check_java, check_pyspark

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
