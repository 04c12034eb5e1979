"""Kill or freeze a process of the application at one point of a transaction.

    kill_at(CrashPoint.AFTER_COMMIT, transfer, url, servers)

This starts a new Python process that calls `transfer(url, servers)`. It ends itself with `kill -9`
when it reaches the point for the first time. A test does so for each point, and then looks whether
the database and the messages agree:

    insert marker    send half    work …    commit    end
    ^           ^    ^       ^              ^     ^   ^  ^
    BEFORE, AFTER    BEFORE, AFTER     BEFORE, AFTER  BEFORE, AFTER

The points are those of `escrowmq.sql`, `escrowmq.django` and `escrowmq.dbapi`, of their blocks and
of transactions that are joined. A producer without a database has only the halves and the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, ParamSpec

from escrowmq.client.messages import Message, SendResult
from escrowmq.client.producer.producer import Producer
from escrowmq.client.producer.transaction import TransactionEnder, TransactionOutcome
from escrowmq.clock import SystemClock
from escrowmq.database import owner
from escrowmq.dbapi.connection import DriverConnection
from escrowmq.errors import EscrowError
from escrowmq.message.transaction import Verdict

P = ParamSpec("P")

TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.01


class CrashPoint(enum.StrEnum):
    """A point of a transaction, in the order in which they are reached."""

    BEFORE_MARKER = "before marker"
    AFTER_MARKER = "after marker"
    BEFORE_HALF = "before half"
    AFTER_HALF = "after half"
    BEFORE_COMMIT = "before commit"
    AFTER_COMMIT = "after commit"
    BEFORE_END = "before end"
    AFTER_END = "after end"


class StopSignal(enum.Enum):
    """What happens to the process at its point."""

    KILL = signal.SIGKILL
    FREEZE = signal.SIGSTOP


# --- the process that runs the test --------------------------------------------------------------


class CrashingProcess:
    """A process that calls a function, and is killed or frozen at one point of a transaction.

    The function is imported in that process, so it belongs to a module; its arguments are pickled.
    A coroutine function runs in an event loop of its own. As a context manager, the process is
    killed at the end of the block if it still runs.
    """

    def __init__(
        self,
        point: CrashPoint,
        stop_signal: StopSignal,
        function: Callable[P, object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        self.point = point
        self.stop_signal = stop_signal
        call = pickle.dumps((function, args, kwargs))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, point.value, stop_signal.name],
            stdin=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            # The function can be imported only with the path of this process.
            stdin.write(pickle.dumps(sys.path) + call)

    def __enter__(self) -> CrashingProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def wait_for_point(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until the process is killed or frozen. Fails if it ends without that."""
        status = self._wait_for_status(timeout_s)
        if os.WIFSTOPPED(status):
            assert self.stop_signal is StopSignal.FREEZE, self._text("was frozen")
            return
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        is_killed = self.stop_signal is StopSignal.KILL and code == -signal.SIGKILL
        assert is_killed, self._text(f"ended with exit code {code}")

    def resume(self) -> None:
        """Let a frozen process continue. It is not frozen again."""
        self._process.send_signal(signal.SIGCONT)

    def wait(self, *, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end of the process and return its exit code: 1 if the function raised."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self._process.returncode is None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    @property
    def errors(self) -> str:
        """What the process has written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _wait_for_status(self, timeout_s: float) -> int:
        clock = SystemClock()
        deadline_s = clock.elapsed_s() + timeout_s
        while True:
            # Popen would not say that a process is frozen.
            pid, status = os.waitpid(self._process.pid, os.WUNTRACED | os.WNOHANG)
            if pid:
                return status
            if clock.elapsed_s() >= deadline_s:
                raise AssertionError(self._text(f"still runs after {timeout_s:g} s"))
            threading.Event().wait(POLL_INTERVAL_S)

    def _text(self, result: str) -> str:
        return f"the process {result}, before it reached {self.point.value!r}:\n{self.errors}"


def kill_at(
    point: CrashPoint, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Call a function in a new process that is killed at this point, and wait for that.

    Fails if the process ends without reaching the point. See CrashingProcess for the function.
    """
    with CrashingProcess(point, StopSignal.KILL, function, *args, **kwargs) as process:
        process.wait_for_point()


@contextlib.contextmanager
def freeze_at(
    point: CrashPoint, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs
) -> Iterator[CrashingProcess]:
    """Call a function in a new process, and run the block while it is frozen at this point.

    The end of the block resumes the process and waits for its end; `wait` then returns its exit
    code.
    """
    with CrashingProcess(point, StopSignal.FREEZE, function, *args, **kwargs) as process:
        process.wait_for_point()
        yield process
        process.resume()
        process.wait()


# --- the process that is killed ------------------------------------------------------------------

Reach = Callable[[CrashPoint], None]


def main(point: str, signal_name: str) -> int:
    sys.path[:] = pickle.load(sys.stdin.buffer)
    function, args, kwargs = pickle.load(sys.stdin.buffer)
    has_stopped = False

    def reach(current: CrashPoint) -> None:
        nonlocal has_stopped
        if current.value == point and not has_stopped:
            has_stopped = True
            # Sent to this thread, it stops this thread before the next instruction, and the others
            # with it. Sent to the process, another thread may take it, and this one gets further.
            signal.pthread_kill(threading.get_ident(), StopSignal[signal_name].value)

    has_marker = _watch_markers(reach)
    _watch_commits(reach, has_marker)
    _watch_halves(reach)
    _watch_ends(reach)
    result = function(*args, **kwargs)
    if inspect.iscoroutine(result):
        asyncio.run(result)
    return 0


def _watch_markers(reach: Reach) -> threading.Event:
    """Watch the markers. The event says that one was inserted, and is not committed yet."""
    insert_marker, has_marker = owner._insert_marker, threading.Event()

    def watched(*args: Any, **kwargs: Any) -> None:
        reach(CrashPoint.BEFORE_MARKER)
        insert_marker(*args, **kwargs)
        has_marker.set()
        reach(CrashPoint.AFTER_MARKER)

    owner._insert_marker = watched
    return has_marker


def _watch_commits(reach: Reach, has_marker: threading.Event) -> None:
    """Watch the commits of all bindings that are installed, where they reach the driver."""

    def watch(connection_class: Any, method_name: str) -> None:
        commit = getattr(connection_class, method_name)

        def watched(*args: Any) -> Any:
            if not has_marker.is_set():
                return commit(*args)  # of another transaction
            reach(CrashPoint.BEFORE_COMMIT)
            result = commit(*args)
            has_marker.clear()
            reach(CrashPoint.AFTER_COMMIT)
            return result

        setattr(connection_class, method_name, watched)

    watch(DriverConnection, "commit")
    with contextlib.suppress(ImportError):
        from sqlalchemy.engine.default import DefaultDialect

        watch(DefaultDialect, "do_commit")
    with contextlib.suppress(ImportError):
        from django.db.backends.base.base import BaseDatabaseWrapper

        watch(BaseDatabaseWrapper, "_commit")


def _watch_halves(reach: Reach) -> None:
    """Watch the half messages of all producers. A blocking producer has one of asyncio inside."""
    park = Producer._park

    async def watched(
        self: Producer, message: Message, extra_properties: dict[str, str], parent: Any = None
    ) -> SendResult:
        reach(CrashPoint.BEFORE_HALF)
        result = await park(self, message, extra_properties, parent)
        reach(CrashPoint.AFTER_HALF)
        return result

    Producer._park = watched  # type: ignore[method-assign]


def _watch_ends(reach: Reach) -> None:
    end = TransactionEnder.end

    async def watched(
        self: TransactionEnder, halves: Sequence[SendResult], verdict: Verdict, *, remark: str = ""
    ) -> tuple[TransactionOutcome, EscrowError | None]:
        reach(CrashPoint.BEFORE_END)
        result = await end(self, halves, verdict, remark=remark)
        reach(CrashPoint.AFTER_END)
        return result

    TransactionEnder.end = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
