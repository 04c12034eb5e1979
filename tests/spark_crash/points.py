"""The named points of a write, as hooks around the functions of source and sink.

Every Python process of Spark imports this module, because it imports the data source of the run. A
file arms a point for an epoch. The process that reaches the point first renames the file and kills
the victim.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from escrowmq.client.sync_connection import SyncConnection
from escrowmq.remoting.codes import RequestCode
from escrowmq.spark import exactly_once, writers
from tests.support.waiting import wait_until

DIRECTORY = "ESCROW_CRASH_DIRECTORY"
FROZEN, THAWED = "frozen", "thawed"
BROKER_PID, DRIVER_PIDS = "broker.pid", "driver.pid"

READ = ("read-offsets", "read-plan", "read-task")
TASK = ("write-begin", "write-registered", "write-parked-one", "write-parked", "write-end")
DRIVER = ("commit-begin", "decide-before", "decide-sent", "decide-after", "commit-end")
POINTS = (*READ, *TASK, *DRIVER)
_FREEZE_TIMEOUT_S = 120.0


def armed_file(directory: Path, epoch: int) -> Path:
    return directory / f"armed-{epoch}.json"


def fired_file(directory: Path, epoch: int) -> Path:
    return directory / f"fired-{epoch}.json"


def write_pids(path: Path, *pids: int) -> None:
    """Replace the file in one step, so that a reader never finds a part of it."""
    new_path = path.with_suffix(".new")
    new_path.write_text(json.dumps(pids))
    new_path.replace(path)


def reach(point: str, epoch: int) -> None:
    """Kill the victim if this is the armed point of the epoch."""
    directory = Path(os.environ.get(DIRECTORY, "/nowhere"))
    try:
        armed = json.loads(armed_file(directory, epoch).read_text())
        if armed["point"] != point:
            return
        victim = armed["victim"]
        pids = _pids_of(victim, directory)
        armed_file(directory, epoch).rename(fired_file(directory, epoch))
    except (OSError, ValueError):
        return  # the epoch is not armed, or another process was first
    if victim == "freeze":
        (directory / FROZEN).touch()
        _wait_for_file(directory / THAWED)
        return
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if victim in ("driver", "executor"):  # this process ends with it, a moment later
        threading.Event().wait(60)


def _wait_for_file(path: Path) -> None:
    """Wait until the file exists. Continues after a timeout: the run then shows the damage."""
    with contextlib.suppress(AssertionError):
        wait_until(path.exists, f"{path} exists", timeout_s=_FREEZE_TIMEOUT_S)


def _pids_of(victim: str, directory: Path) -> list[int]:
    if victim == "freeze":
        return []
    if victim == "worker":
        return [os.getpid()]
    if victim == "executor":
        return [_parent_jvm(os.getpid())]
    name = BROKER_PID if victim == "broker" else DRIVER_PIDS
    pids: list[int] = json.loads((directory / name).read_text())
    return pids


def _parent_jvm(pid: int) -> int:
    """Return the process id of the JVM among the ancestors of a process."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat[stat.index("(") + 1 : stat.rindex(")")] == "java":
            return pid
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])
    raise RuntimeError("no ancestor of this process is a JVM")


def add_hooks(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
    """Replace a function or method by one that also calls the hooks."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    setattr(owner, name, hooked)


class _Current:
    """The epoch that this process is working on."""

    epoch = -1


def _begin_write(_batches: Any, _options: Any, _guarantee: Any, epoch: Any, _task: Any) -> None:
    _Current.epoch = epoch.number
    reach("write-begin", epoch.number)


def _begin_commit(_writer: Any, messages: Any, *_: Any) -> None:
    _Current.epoch = messages[0].epoch.number if messages else -1
    reach("commit-begin", _Current.epoch)


def _reach_if_decision(point: str) -> Callable[..., None]:
    """Return a hook for SyncConnection that reaches the point if the request decides a batch."""

    def hook(_connection: SyncConnection, code: int, *_: Any) -> None:
        if code == RequestCode.DECIDE_BATCH:
            reach(point, _Current.epoch)

    return hook


def install() -> None:
    """Set the hooks in this process."""

    def reach_now(point: str) -> Callable[..., None]:
        return lambda *_: reach(point, _Current.epoch)

    add_hooks(writers, "write", _begin_write, reach_now("write-end"))
    add_hooks(exactly_once.SinkRegistration, "__init__", None, reach_now("write-registered"))
    add_hooks(writers.TransactionalSender, "send", None, reach_now("write-parked-one"))
    add_hooks(writers.TransactionalSender, "flush", None, reach_now("write-parked"))
    # `call` uses `send` and then waits for the response.
    add_hooks(
        SyncConnection,
        "call",
        _reach_if_decision("decide-before"),
        _reach_if_decision("decide-after"),
    )
    add_hooks(SyncConnection, "send", None, _reach_if_decision("decide-sent"))
    for writer in (writers.StreamWriter, writers.BatchWriter):
        add_hooks(writer, "commit", _begin_commit, reach_now("commit-end"))
