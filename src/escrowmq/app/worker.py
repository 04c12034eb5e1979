"""`escrowmq worker`: one process that runs an App, with signals, health and metrics.

    SIGTERM, Ctrl-C   start no handler any more, finish those that run, commit the offsets
    Ctrl-C again      end at once

Exit codes:

    0   it was told to stop, and every handler that ran has ended
    1   start it again: an error ended it, or handlers were cut off after the shutdown timeout
    2   starting it again does not help: there is no such module or App, or a handler is invalid
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.app.app import SHUTDOWN_TIMEOUT_S, App
from escrowmq.clock import SystemClock
from escrowmq.errors import ConfigError, EscrowError, InvalidHandler, InvalidSubscription
from escrowmq.metrics import Registry

log = logging.getLogger(__name__)

STOPPED: Final = 0
FAILED: Final = 1
NOT_STARTED: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of `escrowmq worker`.

    `target` is "module:app". The child number `index` of a supervisor serves its health on the
    listening socket `health_fd` instead of a port, and stops when its standard input ends.
    """

    target: str
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    health_fd: int | None = None
    index: int = 0

    @classmethod
    def with_child(cls, child: str | None, **options: Any) -> WorkerOptions:
        """Return options with those of a child, "INDEX:FD", if it is one."""
        index, _, health_fd = (child or "").partition(":")
        return cls(
            health_fd=int(health_fd) if health_fd else None, index=int(index or 0), **options
        )

    @property
    def is_child(self) -> bool:
        return self.health_fd is not None


def load_app(target: str) -> App:
    """Import "module:app". Raises ConfigError, and what the module raises."""
    module_name, colon, attributes = target.partition(":")
    if not module_name or not colon or not attributes:
        raise ConfigError(
            f"{target!r} does not name an App: write module:app, such as bank.messages:app"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target_object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module may exist and import another one that does not.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"there is no module {error.name!r}: run this in the folder that has it, or install it"
        ) from None
    for attribute in attributes.split("."):
        if not hasattr(target_object, attribute):
            raise ConfigError(f"module {module_name!r} has no {attributes!r}")
        target_object = getattr(target_object, attribute)
    if not isinstance(target_object, App):
        raise ConfigError(f"{target} is no escrowmq.app.App, but {type(target_object).__name__}")
    if not target_object.handlers:
        raise ConfigError(f"{target} has no handlers: register one with @{attributes}.on(topic)")
    return target_object


def start_workers(
    command: Sequence[str], options: WorkerOptions, *, processes: int, reload: bool
) -> int:
    """Run one worker here, or several as children, until SIGTERM or SIGINT.

    `command` is the one that was called. Return the exit code.
    """
    if options.is_child or (processes == 1 and not reload):
        return run_worker(options)
    # Imported here because it brings the HTTP server along.
    from escrowmq.app.supervisor import supervise

    return supervise(command, options, processes=processes, reload=reload)


def run_worker(options: WorkerOptions) -> int:
    """Run a worker until SIGTERM or SIGINT, and return the exit code."""
    try:
        app = load_app(options.target)
    except (ConfigError, InvalidHandler, InvalidSubscription) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return NOT_STARTED
    except Exception:
        log.exception("module cannot be imported target=%s", options.target)
        return NOT_STARTED
    try:
        late = _new_runner().run(_run(app, options))
    except (EscrowError, OSError) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return FAILED
    if late:
        # Their threads cannot be ended, and the interpreter would wait for them.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(FAILED)
    return STOPPED


def _new_runner() -> asyncio.Runner:
    """Return a runner with the event loop of uvloop if it is installed, which is faster."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=importlib.import_module("uvloop").new_event_loop)


async def _run(app: App, options: WorkerOptions) -> int:
    """Run the app, and return how many handlers were cut off."""
    with _stop_on_signals(app.stop, ends_when_orphaned=options.is_child):
        async with _serve_health(app, options):
            return await app.run(shutdown_timeout_s=options.shutdown_timeout_s)


@contextlib.contextmanager
def _stop_on_signals(stop: Callable[[], None], *, ends_when_orphaned: bool) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop_once() -> None:
        log.info("stopping: running handlers are finished, Ctrl-C again ends at once")
        # The default action: it ends the process even if a handler blocks the event loop.
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_once)
    stdin = sys.stdin.fileno() if ends_when_orphaned else None
    if stdin is not None:

        def supervisor_ended() -> None:
            loop.remove_reader(stdin)
            stop_once()

        loop.add_reader(stdin, supervisor_ended)
    try:
        yield
    finally:
        if stdin is not None:
            loop.remove_reader(stdin)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _serve_health(app: App, options: WorkerOptions) -> AsyncIterator[None]:
    """Serve health and metrics on the port or the inherited socket, if there is one."""
    if options.health_fd is not None:
        listener = socket.socket(fileno=options.health_fd)
    elif options.health_port is not None:
        listener = socket.create_server((options.health_host, options.health_port))
    else:
        yield
        return
    # Imported here because it brings the broker's HTTP server and aiohttp along.
    from escrowmq.server.http_server import MetricsServer

    registry = Registry({"group": app.group, "process": str(options.index)})
    registry.add(app.collect)
    server = MetricsServer(registry, SystemClock(), lambda: app.not_ready_reason)
    await server.listen(listener)
    if not options.is_child:
        port = listener.getsockname()[1]
        log.info("health at http://%s:%d/health/ready", options.health_host, port)
    try:
        yield
    finally:
        await server.close()
