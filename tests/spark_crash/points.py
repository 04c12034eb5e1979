"""The named points, and what happens there: hooks around the sink's own functions.

Every Python process of Spark imports this, as it imports the data source of the run. An epoch is
armed by a file; whoever gets to its point first takes the file away and kills the victim.
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

from escrowmq.remoting.codes import RequestCode
from escrowmq.spark import exactly_once as write_sink
from escrowmq.spark import writers as write_task
from escrowmq.spark import writers as writer
from escrowmq.spark.send_pipeline import FrameParts, SendConnection

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
    """At once: whoever reads it finds the old ones or these."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(pids))
    new.replace(path)


def reach(point: str, epoch: int) -> None:
    """If this is the point where somebody dies in this epoch, he dies now."""
    directory = Path(os.environ.get(DIRECTORY, "/nowhere"))
    try:
        armed = json.loads(armed_file(directory, epoch).read_text())
        if armed["point"] != point:
            return
        victim = armed["victim"]
        pids = _pids_of(victim, directory)
        armed_file(directory, epoch).rename(fired_file(directory, epoch))
    except (OSError, ValueError):
        return  # not armed, or somebody was faster
    if victim == "freeze":
        (directory / FROZEN).touch()
        _wait_for(directory / THAWED)
        return
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    if victim in ("driver", "executor"):  # what is killed takes us along, a little later
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


class _Here:
    """The epoch that this process is busy with."""

    epoch = -1


def _begin_write(_batches: Any, _options: Any, _guarantee: Any, epoch: Any, _place: Any) -> None:
    _Here.epoch = epoch.number
    reach("write-begin", epoch.number)


def _ask(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(line: SendConnection, code: RequestCode, *rest: Any) -> Any:
        if code != RequestCode.DECIDE_BATCH:
            return original(line, code, *rest)
        reach("decide-before", _Here.epoch)
        send = line._send

        def sent(frame: FrameParts) -> None:
            send(frame)
            reach("decide-sent", _Here.epoch)

        line._send = sent  # type: ignore[method-assign]
        try:
            return original(line, code, *rest)
        finally:
            line._send = send  # type: ignore[method-assign]
            reach("decide-after", _Here.epoch)

    return hooked


def _begin_commit(_writer: Any, messages: Any, *_: Any) -> None:
    _Here.epoch = messages[0].epoch.number if messages else -1
    reach("commit-begin", _Here.epoch)


def install() -> None:
    """In this process, from now on."""
    around(writer, "write", _begin_write, lambda *args: reach("write-end", args[3].number))
    registration = write_sink.SinkRegistration
    around(registration, "__init__", None, lambda *_: reach("write-registered", _Here.epoch))
    around(
        write_task.TransactionalSender,
        "send",
        None,
        lambda *_: reach("write-parked-one", _Here.epoch),
    )
    around(
        write_task.TransactionalSender, "flush", None, lambda *_: reach("write-parked", _Here.epoch)
    )
    SendConnection._call_once = _ask(SendConnection._call_once)  # type: ignore[method-assign]
    commit_end: Callable[..., None] = lambda *_: reach("commit-end", _Here.epoch)  # noqa: E731
    around(writer.StreamWriter, "commit", _begin_commit, commit_end)
