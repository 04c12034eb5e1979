"""`escrowmq worker --processes N --reload`: worker processes that are started again.

    this process    signals, health and metrics of all workers, the files that are watched
    each child      a worker: the same command with --child, health on a socket that it inherits

A child that dies is started again after a delay that grows up to half a minute. One that says that
starting it again does not help ends all, except with --reload, where the next change may help.

The standard input of a child is a pipe whose other end only this process holds: when this process
ends, even by SIGKILL, the child finishes its handlers and ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from escrowmq.app.worker import FAILED, NOT_STARTED, STOPPED, WorkerOptions
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import NotSent
from escrowmq.metrics import Counter, Gauge, Registry, Samples
from escrowmq.server.http_server import MetricsServer
from escrowmq.server.supervisor import MergedMetrics, RestartBackoff, fetch_page

log = logging.getLogger(__name__)

KILLED: Final = 130  # Ctrl-C a second time
KILL_MARGIN_S: Final = 10.0  # beyond the shutdown timeout, then a child is killed
HEALTH_INTERVAL_S: Final = 1.0
WATCH_INTERVAL_S: Final = 0.5

PROCESS_UP: Final = Gauge(
    "escrowmq_app_process_up", "1 if a worker process handles messages, 0 if not.", ("process",)
)
PROCESS_RESTARTS: Final = Counter(
    "escrowmq_app_process_restarts_total", "Restarts of a worker that died.", ("process",)
)


def supervise(
    command: Sequence[str], options: WorkerOptions, *, processes: int, reload: bool
) -> int:
    """Run workers until SIGTERM or SIGINT, and return the exit code.

    `command` starts a worker; `--child INDEX:FD` is appended to it.
    """
    return asyncio.run(_Supervisor(command, options, processes, reload).run())


class WorkerProcess:
    """A worker in a process of its own."""

    def __init__(self, index: int, command: Sequence[str], clock: Clock) -> None:
        self.name = str(index)
        self.restarts = 0
        self.exit_code = STOPPED
        self.not_ready_reason: str | None = f"worker {index} is starting"
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._command = [*command, "--child", f"{index}:{self._socket.fileno()}"]
        self._clock = clock
        self._process: Process | None = None
        self._is_stopping = False

    async def run(self, failed: asyncio.Event) -> None:
        """Run the worker until `stop`. Set `failed` if starting it again does not help."""
        self._is_stopping = False
        backoff = RestartBackoff()
        while True:
            began_s = self._clock.elapsed_s()
            self.exit_code = await self._run_once()
            if self._is_stopping:
                return
            if self.exit_code == NOT_STARTED:
                failed.set()
                return
            wait_s = backoff.next_wait_s(self._clock.elapsed_s() - began_s)
            log.error(
                "worker died, restarting in %s s process=%s exit_code=%d",
                wait_s,
                self.name,
                self.exit_code,
            )
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> int:
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=PIPE,
                pass_fds=(self._socket.fileno(),),
                start_new_session=True,  # Ctrl-C reaches only the supervisor, which stops it
            )
        except OSError as error:  # no memory or no open file for another process
            log.error("worker could not be started process=%s: %s", self.name, error)
            return FAILED
        log.info("worker process started process=%s pid=%d", self.name, process.pid)
        try:
            return await process.wait()
        finally:
            self._process = None
            self.not_ready_reason = f"worker {self.name} is starting"

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, run_task: asyncio.Task[None], timeout_s: float) -> None:
        """Stop the worker, by force if it takes too long. `run_task` is the task of `run`."""
        self._is_stopping = True
        if self._process is None:
            run_task.cancel()  # it waits for the next restart, or has ended
        self.signal(signal.SIGTERM)
        _, late = await asyncio.wait([run_task], timeout=timeout_s)
        if late:
            log.error("worker did not stop in %g s, killed process=%s", timeout_s, self.name)
            self.exit_code = FAILED
            self.signal(signal.SIGKILL)
            await asyncio.wait([run_task])

    async def fetch(self, path: str) -> tuple[int, str]:
        """Get a page of the worker; return status and body. Raises NotSent."""
        if self._process is None:
            raise NotSent(f"worker {self.name} is not running")
        return await asyncio.to_thread(fetch_page, self._socket.getsockname()[1], path)

    async def update_health(self) -> None:
        try:
            status, body = await self.fetch("/health/ready")
        except NotSent as error:
            self.not_ready_reason = str(error)
        else:
            self.not_ready_reason = None if status == 200 else f"{self.name}: {body.strip()}"


class _Supervisor:
    def __init__(
        self, command: Sequence[str], options: WorkerOptions, processes: int, reload: bool
    ) -> None:
        clock = SystemClock()
        self._options = options
        self._reload = reload
        self._workers = [WorkerProcess(index, command, clock) for index in range(processes)]
        self._clock = clock
        self._stopped = asyncio.Event()
        self._is_killed = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        watcher = SourceWatcher(Path.cwd()) if self._reload else None
        async with self._serve_health():
            while True:
                reason = await self._run_workers(watcher)
                if reason == "failed" and watcher is not None:
                    log.info("waiting for a change of the source")
                    reason = await _first(stopped=self._stopped.wait(), changed=watcher.wait())
                if reason != "changed":
                    break
                log.info("source has changed, starting again")
        if self._is_killed:
            return KILLED
        if reason == "failed":
            return NOT_STARTED
        return FAILED if any(worker.exit_code for worker in self._workers) else STOPPED

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._stopped.is_set():
            self._is_killed = True
            for worker in self._workers:
                worker.signal(signal.SIGKILL)
        elif not self._stopped.is_set():
            log.info("stopping: running handlers are finished, Ctrl-C again ends at once")
            self._stopped.set()

    async def _run_workers(self, watcher: SourceWatcher | None) -> str:
        """Run all workers until one of the reasons to stop them, and return it."""
        failed = asyncio.Event()
        tasks = [asyncio.create_task(worker.run(failed)) for worker in self._workers]
        reasons: dict[str, Coroutine[Any, Any, object]]
        reasons = {"stopped": self._stopped.wait(), "failed": failed.wait()}
        if watcher is not None:
            reasons["changed"] = watcher.wait()
        reason = await _first(**reasons)
        timeout_s = self._options.shutdown_timeout_s + KILL_MARGIN_S
        await asyncio.gather(
            *(
                worker.stop(task, timeout_s)
                for worker, task in zip(self._workers, tasks, strict=True)
            )
        )
        return reason

    # --- health and metrics ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _serve_health(self) -> AsyncIterator[None]:
        options = self._options
        if options.health_port is None:
            yield
            return
        page = _WorkerPages(self._workers)
        server = MetricsServer(page, self._clock, self._not_ready_reason, before_render=page.fetch)
        listener = socket.create_server((options.health_host, options.health_port))
        await server.listen(listener)
        port = listener.getsockname()[1]
        log.info("health at http://%s:%d/health/ready", options.health_host, port)
        task = asyncio.create_task(self._watch_health())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.close()

    async def _watch_health(self) -> None:
        while True:
            for worker in self._workers:
                await worker.update_health()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    def _not_ready_reason(self) -> str | None:
        if self._stopped.is_set():
            return "the workers are stopping"
        reasons = (worker.not_ready_reason for worker in self._workers)
        return next((reason for reason in reasons if reason is not None), None)


class _WorkerPages:
    """The metrics of this process and of all workers, as of the last `fetch`."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._registry = Registry()
        self._registry.add(self._collect)
        self._metrics = MergedMetrics()

    async def fetch(self) -> None:
        metrics = MergedMetrics()
        metrics.add(self._registry.lines())
        for worker in self._workers:
            with contextlib.suppress(NotSent):  # escrowmq_app_process_up shows that it is down
                status, body = await worker.fetch("/metrics")
                if status == 200:
                    metrics.add(body.splitlines(keepends=True))
        self._metrics = metrics

    def lines(self) -> Iterator[str]:
        return self._metrics.lines()

    def _collect(self) -> Iterator[Samples]:
        workers = self._workers
        yield PROCESS_UP.samples(((w.name,), int(w.not_ready_reason is None)) for w in workers)
        yield PROCESS_RESTARTS.samples(((worker.name,), worker.restarts) for worker in workers)


async def _first(**reasons: Coroutine[Any, Any, object]) -> str:
    """Wait for the first of several coroutines, cancel the others, and return its name."""
    tasks = {asyncio.create_task(wait): name for name, wait in reasons.items()}
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return next(name for task, name in tasks.items() if task in done)


# --- reload --------------------------------------------------------------------------------------


class SourceWatcher:
    """Notices changes of Python files below a folder, by their times and sizes.

    Hidden folders, virtual environments and caches are left out.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen = self._scan()

    async def wait(self) -> None:
        """Wait until a file is changed, added or removed."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            versions = await asyncio.to_thread(self._scan)
            if versions != self._seen:
                self._seen = versions
                return

    def _scan(self) -> dict[str, tuple[int, int]]:
        versions = {}
        for folder, folders, files in os.walk(self._root):
            folders[:] = [
                name
                for name in folders
                if not name.startswith((".", "__pycache__", "node_modules"))
                and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
            ]
            for name in files:
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with contextlib.suppress(OSError):  # it was removed in between
                        stat = os.stat(path)
                        versions[path] = stat.st_mtime_ns, stat.st_size
        return versions
