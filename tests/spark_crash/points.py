"""The named points of a write, as hooks around the functions of source and sink.

Every Python process of Spark imports this module, because it imports the data source of the run. A
file arms an epoch. The process that reaches the point first removes the file and kills the victim.
"""

from __future__ import annotations

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

DIRECTORY = "ESCROW_CRASH_DIRECTORY"
FROZEN, THAWED = "frozen", "thawed"
BROKER_PID, DRIVER_PIDS = "broker.pid", "driver.pid"

READ = ("read-offsets", "read-plan", "read-task")
TASK = ("write-begin", "write-registered", "write-parked-one", "write-parked", "write-end")
DRIVER = ("commit-begin", "decide-before", "decide-sent", "decide-after", "commit-end")
POINTS = (*READ, *TASK, *DRIVER)
_FREEZE_S = 120.0


def armed_file(directory: Path, epoch: int) -> Path:
    return directory / f"armed-{epoch}.json"


def fired_file(directory: Path, epoch: int) -> Path:
    return directory / f"fired-{epoch}.json"


def note_pids(path: Path, *pids: int) -> None:
    """Replace the file in one step, so that a reader finds the old ids or the new ones."""
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
        return  # not armed, or another process was first
    if victim == "freeze":
        (directory / FROZEN).touch()
        _wait_for(directory / THAWED)
        return
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if victim in ("driver", "executor"):  # this process dies with it, a little later
        threading.Event().wait(60)


def _wait_for(path: Path) -> None:
    pause = threading.Event()
    for _ in range(int(_FREEZE_S / 0.05)):
        if path.exists():
            return
        pause.wait(0.05)


def _pids_of(victim: str, directory: Path) -> list[int]:
    if victim == "freeze":
        return []
    if victim == "worker":
        return [os.getpid()]
    if victim == "executor":
        return [_java_above(os.getpid())]
    name = BROKER_PID if victim == "broker" else DRIVER_PIDS
    pids: list[int] = json.loads((directory / name).read_text())
    return pids


def _java_above(pid: int) -> int:
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat[stat.index("(") + 1 : stat.rindex(")")] == "java":
            return pid
        pid = int(stat[stat.rindex(")") + 2 :].split()[1])
    raise RuntimeError("no JVM above this process")


def around(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
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
    """The epoch that this process works on."""

    epoch = -1


def _begin_write(_batches: Any, _options: Any, _guarantee: Any, epoch: Any, _task: Any) -> None:
    _Current.epoch = epoch.number
    reach("write-begin", epoch.number)


def _begin_commit(_writer: Any, messages: Any, *_: Any) -> None:
    _Current.epoch = messages[0].epoch.number if messages else -1
    reach("commit-begin", _Current.epoch)


def _reach_of_decision(point: str) -> Callable[..., None]:
    """Return a hook of a method of SyncConnection that reaches the point if it decides a batch."""

    def hook(_connection: SyncConnection, code: int, *_: Any) -> None:
        if code == RequestCode.DECIDE_BATCH:
            reach(point, _Current.epoch)

    return hook


def install() -> None:
    """Set the hooks in this process."""

    def reach_now(point: str) -> Callable[..., None]:
        return lambda *_: reach(point, _Current.epoch)

    around(writers, "write", _begin_write, reach_now("write-end"))
    around(exactly_once.SinkRegistration, "__init__", None, reach_now("write-registered"))
    around(writers.TransactionalSender, "send", None, reach_now("write-parked-one"))
    around(writers.TransactionalSender, "flush", None, reach_now("write-parked"))
    # A request is sent by `send`, which `call` uses: between the two, its response is awaited.
    around(
        SyncConnection,
        "call",
        _reach_of_decision("decide-before"),
        _reach_of_decision("decide-after"),
    )
    around(SyncConnection, "send", None, _reach_of_decision("decide-sent"))
    around(writers.StreamWriter, "commit", _begin_commit, reach_now("commit-end"))
