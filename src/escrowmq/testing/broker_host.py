"""Run a broker with its name server for tests: in a thread, or in a process of its own.

    LocalBroker ── call("check_back_now", …) ──▶ BrokerThread ──────────────────▶ BrokerHost
                                                 BrokerProcess ── a line ──▶ main() ──▶ BrokerHost

Both run the same `BrokerHost`, so both have the same faults. The process reads commands from its
standard input, a line of JSON each, and responds with a line each. It ends when its standard input
does, so that no test leaves a broker behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import uvloop

from escrowmq.config import load_config
from escrowmq.errors import BrokerStopped, EscrowError
from escrowmq.server.live_config import LiveConfig, RuntimeSettings
from escrowmq.server.serve import RunningBroker, run_servers
from escrowmq.testing.connection_faults import ConnectionFaults

log = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 30.0


class _Killed(Exception):
    """Ends the servers as `kill -9` would."""


class BrokerHost:
    """A broker and a name server on the event loop of this thread.

    The methods from `check_back_now` on are the commands of a LocalBroker. They are called on the
    event loop.
    """

    def __init__(self, conf: Path) -> None:
        self._conf = conf
        self._faults = ConnectionFaults()
        self._broker: RunningBroker | None = None
        self._ended = asyncio.Event()
        self._is_killed = False

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Run until `stop` or `kill` is called.

        Raises EscrowError or OSError if it cannot start, and BrokerStopped if it has failed.
        """
        resolved = load_config(self._conf)
        live_config, failed = LiveConfig(resolved.config), asyncio.Event()
        settings = RuntimeSettings(live_config, resolved.origins, None)
        servers = run_servers(live_config, settings, failed, wrap_connection=self._faults.wrap)
        with contextlib.suppress(_Killed):
            async with servers as running:
                self._broker = running.broker
                on_ready()
                waits = [asyncio.create_task(event.wait()) for event in (self._ended, failed)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                if self._is_killed:
                    raise _Killed
        if failed.is_set():
            raise BrokerStopped("the broker has failed and stopped; its log says why")

    def stop(self) -> None:
        """Stop it as an operator does: everything is saved."""
        self._ended.set()

    def kill(self) -> None:
        """End it as `kill -9` does: nothing more is answered or saved."""
        self._faults.refuse_connections(True)
        self._is_killed = True
        self._ended.set()

    def check_back_now(self, group: str) -> int:
        """Check the open transactions of a group, or of all if it is empty; return how many."""
        assert self._broker is not None
        server, coordinator = self._broker.server, self._broker.broker.transactions.coordinator
        halves = [
            half
            for half in coordinator.halves
            if group in ("", half.group) and not (half.is_stranded or half.reason)
        ]
        server.schedule_turn()  # at its end, the broker looks for what is due
        for half in halves:
            coordinator.reschedule(half, server.turn_start_ms)
        return len(halves)

    def set_delay(self, seconds: float) -> None:
        self._faults.set_delay(seconds)

    def refuse_connections(self, refuses: bool) -> None:
        self._faults.refuse_connections(refuses)

    def begin_loss(self, codes: Collection[int], count: int) -> int:
        return self._faults.begin_loss(codes, count)

    def end_loss(self, number: int) -> int:
        return self._faults.end_loss(number)


class BrokerRunner(Protocol):
    """Where a BrokerHost runs. Each object is for one run."""

    def start(self) -> None:
        """Start it, and return when clients can connect. Raises EscrowError or OSError."""

    def call(self, command: str, *arguments: Any) -> Any:
        """Call a method of the BrokerHost and return its result."""

    def stop(self) -> None:
        """Stop it cleanly and wait for the end. Raises BrokerStopped if the broker had failed."""

    def kill(self) -> None: ...

    def freeze(self) -> None:
        """Suspend it: nothing runs until `resume`."""

    def resume(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...


# --- in a thread ---------------------------------------------------------------------------------


class BrokerThread:
    """Runs a BrokerHost in a thread of this process."""

    def __init__(self, conf: Path) -> None:
        self._host = BrokerHost(conf)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: Future[None] = Future()
        self._failure: BaseException | None = None
        self._resumed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="escrowmq-broker", daemon=True)

    def start(self) -> None:
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._thread.join()
            raise

    def call(self, command: str, *arguments: Any) -> Any:
        assert self._loop is not None

        async def run() -> Any:
            return getattr(self._host, command)(*arguments)

        if not self.is_alive:
            raise BrokerStopped("the broker has stopped")
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(STOP_TIMEOUT_S)

    def stop(self) -> None:
        if self.is_alive:
            self.call("stop")
        self._thread.join(STOP_TIMEOUT_S)
        if self._failure is not None:
            raise self._failure

    def kill(self) -> None:
        self.call("kill")
        self._thread.join(STOP_TIMEOUT_S)

    def freeze(self) -> None:
        assert self._loop is not None
        self._resumed.clear()
        is_frozen = threading.Event()

        def wait() -> None:
            is_frozen.set()
            self._resumed.wait()

        self._loop.call_soon_threadsafe(wait)
        is_frozen.wait(STOP_TIMEOUT_S)

    def resume(self) -> None:
        self._resumed.set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._host.run(lambda: self._ready.set_result(None)))
        except BaseException as error:
            self._failure = error
            if not self._ready.done():
                self._ready.set_exception(error)


# --- in a process --------------------------------------------------------------------------------


class _Response(NamedTuple):
    """One line of the process. `errno` is that of an OSError."""

    result: Any = None
    error: str = ""
    errno: int = 0


class BrokerProcess:
    """Runs a BrokerHost in a process of its own, which `kill -9` can end."""

    def __init__(self, conf: Path, log_file: Path) -> None:
        self._conf = conf
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._log_file.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self._conf)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        try:
            self._read_response()
        except BaseException:
            self._end(signal.SIGKILL)
            raise

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def call(self, command: str, *arguments: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._lock:
            line = json.dumps([command, *arguments]).encode() + b"\n"
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except OSError as error:
                raise BrokerStopped(f"the process of the broker has ended: {error}") from error
            return self._read_response()

    def stop(self) -> None:
        code = self._end(signal.SIGTERM)
        if code != 0:
            raise BrokerStopped(f"the process of the broker ended with exit code {code}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _read_response(self) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BrokerStopped(
                f"the process of the broker has ended: {self._log_file.read_text()}"
            )
        response = _Response(*json.loads(line))
        if response.errno:
            raise OSError(response.errno, response.error)
        if response.error:
            raise EscrowError(response.error)
        return response.result

    def _end(self, number: signal.Signals) -> int:
        """Send a signal that ends the process, wait for it, and return its exit code."""
        process = self._process
        assert process is not None
        process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


def main(conf: Path) -> int:
    """Run a BrokerHost in this process: see the docstring of the module."""
    host = BrokerHost(conf)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(_run_in_process(host))
    except (EscrowError, OSError) as error:
        # The parent reads this if the start has failed, and ignores it otherwise.
        _print_response(_Response(None, str(error), getattr(error, "errno", None) or 0))
        return 1
    return 0


async def _run_in_process(host: BrokerHost) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)
    stdin, received = sys.stdin.fileno(), bytearray()

    def read_commands() -> None:
        data = os.read(stdin, 65_536)
        if not data:
            os._exit(1)  # the process that started this one is gone
        received.extend(data)
        while (end := received.find(b"\n")) >= 0:
            line = bytes(received[:end])
            del received[: end + 1]
            _run_command(host, line)

    def on_ready() -> None:
        _print_response(_Response())
        loop.add_reader(stdin, read_commands)

    await host.run(on_ready)


def _run_command(host: BrokerHost, line: bytes) -> None:
    command, *arguments = json.loads(line)
    try:
        _print_response(_Response(getattr(host, command)(*arguments)))
    except Exception as error:
        log.exception("command failed: %s", command)
        _print_response(_Response(None, f"{type(error).__name__}: {error}"))


def _print_response(response: _Response) -> None:
    sys.stdout.write(json.dumps(response) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
