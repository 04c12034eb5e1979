"""`escrowmq serve --brokers N`: N brokers on one machine that clients see as one cluster.

    this process    the name server, the metrics of all brokers, N child processes
    each child      a broker: broker-a-0 in DATA/broker-0 on port P, the next one on P + 10, …

A broker runs in one Python thread, so several processes are needed to use several cores. A child
that dies is started again, whatever its exit code, after a delay that grows up to half a minute.
If a child cannot start at all, this process ends with the exit code of the child, so that whoever
started it knows whether to try again (server/serve.py has the codes).

The standard input of a child is a pipe whose other end only this process holds: when this process
ends, even by SIGKILL, the pipe is closed and the child stops cleanly. The child serves its metrics
on a socket that it inherits from this process, so it needs no port of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import uvloop

from escrowmq.client_memory import ClientMemory
from escrowmq.clock import Clock, SystemClock
from escrowmq.config import Config, ResolvedConfig
from escrowmq.errors import ConfigError, EscrowError, NotSent
from escrowmq.metrics import Counter, Gauge, Registry, Samples
from escrowmq.secret import Secret
from escrowmq.server.connection_limits import MemoryWatermark, memory_limits
from escrowmq.server.live_config import LiveConfig
from escrowmq.server.metrics import Health, client_memory_metrics, new_registry
from escrowmq.server.namesrv import serve_name_server
from escrowmq.server.security import (
    AccessControl,
    InternalAccount,
    configured_internal_account,
    new_internal_account,
    require_auth_or_loopback,
)
from escrowmq.server.serve import (
    FAILED,
    NOT_STARTED,
    STOPPED,
    new_live_config,
    raise_file_limit,
    report_start_error,
)
from escrowmq.server.tasks import background_tasks
from escrowmq.store.check import is_store
from escrowmq.store.disk import RealDisk
from escrowmq.store.log_files import LogFiles

log = logging.getLogger(__name__)

BACKOFF_S: Final = (0.5, 1, 2, 5, 10, 30)  # before the n-th restart in a row
STABLE_RUN_S: Final = 60.0  # after a run of this length, the backoff starts from the beginning


class RestartBackoff:
    """Says how long to wait before a process that died is started again."""

    def __init__(self) -> None:
        self._short_runs = 0  # in a row

    def next_wait_s(self, run_s: float) -> float:
        """Return the time to wait after a run of `run_s`."""
        self._short_runs = 0 if run_s >= STABLE_RUN_S else self._short_runs + 1
        return BACKOFF_S[min(max(self._short_runs - 1, 0), len(BACKOFF_S) - 1)]


FETCH_TIMEOUT_S: Final = 5.0
STOP_TIMEOUT_S: Final = 60.0  # then a child is killed
_ACCOUNT_VARIABLE: Final = "ESCROWMQ_INNER_CLIENT_AUTHENTICATION_CREDENTIALS"
_READY: Final = b"escrowmq is ready"
_MAIN_ARGUMENTS: Final = ("-c", "from escrowmq.cli.main import main; main()")


class ChildBroker:
    """A broker in a process of its own."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        clock: Clock,
        account: tuple[str, Secret] | None = None,
    ) -> None:
        """`account` is the one that broker and supervisor share; None without an ACL.

        The child gets it in its environment: unlike a command line, other users cannot read that.
        """
        self.name = name
        self._arguments = list(arguments)
        self._environment = {**os.environ, **environment}
        self._account = account
        if account is not None:
            self._environment[_ACCOUNT_VARIABLE] = json.dumps(
                {"accessKey": account[0], "secretKey": account[1].reveal()}
            )
        self._clock = clock
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._process: Process | None = None
        self._is_stopping = False
        self.exit_code = 0
        self.restarts = 0
        self.ready = asyncio.Event()  # set while the child is ready

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self, failed: asyncio.Event) -> None:
        """Run the child until `stop()`. `failed` is set if it ends before it was ever ready."""
        backoff = RestartBackoff()
        has_been_ready = False
        while not self._is_stopping:
            began_s = self._clock.elapsed_s()
            try:
                await self._run_once()
            except OSError as error:  # no memory or no open file for another process
                log.error("broker could not be started name=%s: %s", self.name, error)
                self.exit_code = FAILED
            has_been_ready = has_been_ready or self.ready.is_set()
            self.ready.clear()
            if self._is_stopping:
                return
            if not has_been_ready:
                failed.set()
                return
            wait_s = backoff.next_wait_s(self._clock.elapsed_s() - began_s)
            log.error(
                "broker died, restarting in %s s name=%s exit_code=%d",
                wait_s,
                self.name,
                self.exit_code,
            )
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> None:
        metrics_fd = self._socket.fileno()
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_MAIN_ARGUMENTS,
            *self._arguments,
            *("--metrics-socket", str(metrics_fd)),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            pass_fds=(metrics_fd,),
            start_new_session=True,  # Ctrl-C reaches only this process, which stops the children
        )
        log.info("broker started name=%s pid=%d", self.name, process.pid)
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(_READY):
                self.ready.set()
        self.exit_code = await process.wait()
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, run_task: asyncio.Task[None]) -> None:
        """Stop the child, by force if it takes too long. `run_task` is the task of `run()`."""
        self._is_stopping = True
        if self._process is None:
            run_task.cancel()  # it waits for the next restart
        self.signal(signal.SIGTERM)
        _, late = await asyncio.wait([run_task], timeout=STOP_TIMEOUT_S)
        if late:
            log.error("broker did not stop in %d s, killed name=%s", STOP_TIMEOUT_S, self.name)
            self.signal(signal.SIGKILL)
            await asyncio.wait([run_task])
        self._socket.close()

    async def http_get(self, path: str) -> tuple[int, str]:
        """Get a page of the child over HTTP; return status and body. Raises NotSent."""
        if self._process is None:
            raise NotSent(f"{self.name} is not running")
        port = self._socket.getsockname()[1]
        return await asyncio.to_thread(fetch_page, port, path, self._account)

    async def not_ready_reason(self) -> str | None:
        if not self.ready.is_set():
            return f"{self.name} is starting"
        try:
            status, body = await self.http_get("/health/ready")
        except NotSent as error:
            return str(error)
        return None if status == 200 else f"{self.name}: {body.strip()}"


def fetch_page(port: int, path: str, account: tuple[str, Secret] | None = None) -> tuple[int, str]:
    """Get a page of another process of this machine over HTTP; return status and body.

    Blocks for at most a few seconds. Raises NotSent.
    """
    headers = {}
    if account is not None:
        login = base64.b64encode(f"{account[0]}:{account[1].reveal()}".encode()).decode()
        headers["Authorization"] = f"Basic {login}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=FETCH_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise NotSent(f"port {port} does not respond to {path}: {error!r}") from error
    finally:
        connection.close()


BROKERS_MAX = 64
PORT_STEP = 10  # as in RocketMQ's examples
HEALTH_INTERVAL_S = 1.0


def supervise(
    config: Config,
    role: str,
    count: int,
    arguments: Sequence[str],
    resolve: Callable[[], ResolvedConfig] | None = None,
) -> int:
    """Run the cluster until SIGTERM or SIGINT and return the exit code.

    `arguments` are those of this command; they are passed on to the brokers.
    """
    live_config = new_live_config(config, resolve)
    raise_file_limit(config.network.connections_max)
    try:
        check_no_unserved_store(config.store.root_dir, count)
        require_auth_or_loopback(config)
        return uvloop.run(_supervise(config, role, count, arguments, live_config))
    except (EscrowError, OSError, MemoryError) as error:
        return report_start_error(error, config.store.root_dir)


# --- directories ---------------------------------------------------------------------------------


def broker_directory(root: str | os.PathLike[str], index: int) -> str:
    return os.path.join(root, f"broker-{index}")


def check_no_unserved_store(root: str | os.PathLike[str], count: int) -> None:
    """Raise ConfigError if the directory holds messages that none of the brokers would serve."""
    if _has_records(str(root)):
        raise ConfigError(
            f"{root} holds the messages of a single broker, which would not be served with "
            f"--brokers: start without it, or move the files to {broker_directory(root, 0)}"
        )
    unserved = [index for index in _store_indexes(root) if index >= count]
    if unserved:
        raise ConfigError(
            f"{broker_directory(root, unserved[-1])} holds messages, which would not be served "
            f"with --brokers {count}: "
            f"start with --brokers {unserved[-1] + 1}, or move that directory away"
        )


def check_single_broker_store(root: str | os.PathLike[str]) -> None:
    """Raise ConfigError if the directory holds the messages of several brokers."""
    indexes = _store_indexes(root)
    if indexes and not _has_records(str(root)):
        raise ConfigError(
            f"{root} holds the messages of {indexes[-1] + 1} brokers, which a single broker would "
            f"not serve: start with --brokers {indexes[-1] + 1}"
        )


def _store_indexes(root: str | os.PathLike[str]) -> list[int]:
    names = RealDisk(root).names("")
    suffixes = [name.removeprefix("broker-") for name in names if name.startswith("broker-")]
    indexes = sorted(int(suffix) for suffix in suffixes if suffix.isdecimal())
    return [index for index in indexes if _has_records(broker_directory(root, index))]


def _has_records(directory: str) -> bool:
    disk = RealDisk(directory)
    if not is_store(disk):
        return False
    files = LogFiles(disk)
    try:
        return next(files.scan(), None) is not None
    finally:
        files.close()


# --- running -------------------------------------------------------------------------------------


async def _supervise(
    config: Config, role: str, count: int, arguments: Sequence[str], live_config: LiveConfig
) -> int:
    # `failed`: a part of this process. `start_failed`: a child that was never ready.
    stopped, failed, start_failed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    clock = SystemClock()
    # The brokers register at the name server with this account, and this process reads their
    # metrics with it. If the operator has configured an account for other name servers, the brokers
    # need that one, so it is used for everything.
    account = configured_internal_account(config)
    if account is None and config.security.is_acl_on:
        account = new_internal_account()
    access = AccessControl(config, account)
    registry, health, pages = new_registry(config, "namesrv"), Health(), _ClusterMetrics()
    children: list[ChildBroker] = []
    async with contextlib.AsyncExitStack() as parts:
        await parts.enter_async_context(
            background_tasks(failed, *(watcher.run() for watcher in access.watchers))
        )
        if config.metrics.is_enabled:
            from escrowmq.server.http_server import serve_http  # aiohttp: only if it is needed

            http = serve_http(config, clock, pages, health, access, before_render=pages.fetch)
            await parts.enter_async_context(http)
        addresses, own_address = list(config.broker.namesrv_addresses), None
        if role == "all":
            watermark = MemoryWatermark(ClientMemory(memory_limits(config.network)))
            registry.add(client_memory_metrics(watermark))
            own_address = await parts.enter_async_context(
                serve_name_server(clock, access, registry, live_config, failed, watermark)
            )
            addresses.insert(0, own_address)
        child_arguments = [*_without_brokers_option(arguments)]
        if own_address is not None:
            child_arguments += ["--own-namesrv", own_address]
        for index in range(count):
            children.append(_new_child(config, index, addresses, child_arguments, clock, account))
        registry.add(lambda: _child_metrics(children))
        pages.registry, pages.children = registry, children
        health.add(lambda: _first_not_ready(children))
        loop.add_signal_handler(signal.SIGHUP, lambda: _reload(live_config, children))
        await parts.enter_async_context(_run_children(children, start_failed))
        if await _wait_all_ready(children, stopped, failed, start_failed):
            await parts.enter_async_context(_watch_health(children, health))
            _print_ready(config, addresses, children)
            await _wait_first(stopped, failed)
        log.info("stopping")
        health.reason = "stopping"
    log.info("stopped")
    if start_failed.is_set():
        sys.stderr.write("escrowmq: a broker could not start, see the log above\n")
        is_lasting = any(child.exit_code == NOT_STARTED for child in children)
        return NOT_STARTED if is_lasting else FAILED
    has_failed = failed.is_set() or any(child.exit_code for child in children)
    return FAILED if has_failed else STOPPED


def _new_child(
    config: Config,
    index: int,
    addresses: list[str],
    arguments: Sequence[str],
    clock: Clock,
    account: InternalAccount | None,
) -> ChildBroker:
    name, port = f"{config.broker.broker_name}-{index}", config.network.listen_port
    own = ["--role", "broker", "--data", broker_directory(config.store.root_dir, index)]
    own += ["--port", str(port + index * PORT_STEP if port else 0), "--metrics-port", "0"]
    environment = {
        "ESCROWMQ_BROKER_NAME": name,
        "ESCROWMQ_NAMESRV_ADDR": ";".join(addresses),
    }
    return ChildBroker(name, [*arguments, *own], environment, clock, account)


def _without_brokers_option(arguments: Sequence[str]) -> Iterator[str]:
    skip = False
    for argument in arguments:
        if not skip and argument != "--brokers" and not argument.startswith("--brokers="):
            yield argument
        skip = not skip and argument == "--brokers"


@contextlib.asynccontextmanager
async def _run_children(children: list[ChildBroker], failed: asyncio.Event) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(child.run(failed)) for child in children]
    try:
        yield
    finally:
        await asyncio.gather(
            *(child.stop(task) for child, task in zip(children, tasks, strict=True))
        )


@contextlib.asynccontextmanager
async def _watch_health(children: list[ChildBroker], health: Health) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            reasons = [await child.not_ready_reason() for child in children]
            health.reason = next((reason for reason in reasons if reason is not None), None)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _wait_all_ready(children: list[ChildBroker], *reasons_to_stop: asyncio.Event) -> bool:
    """Wait until all children are ready. Return False if there is a reason to stop before."""

    async def all_ready() -> None:
        for child in children:
            await child.ready.wait()

    ready = asyncio.create_task(all_ready())
    await _wait_first(*reasons_to_stop, extra_task=ready)
    return not any(reason.is_set() for reason in reasons_to_stop)


async def _wait_first(*events: asyncio.Event, extra_task: asyncio.Task[None] | None = None) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    tasks: list[asyncio.Task[object]] = [*waits, *([extra_task] if extra_task is not None else [])]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _first_not_ready(children: list[ChildBroker]) -> str | None:
    names = (child.name for child in children if not child.ready.is_set())
    return next((f"{name} is starting" for name in names), None)


def _reload(live_config: LiveConfig, children: list[ChildBroker]) -> None:
    live_config.reload()
    for child in children:
        child.signal(signal.SIGHUP)


def _print_ready(config: Config, addresses: list[str], children: list[ChildBroker]) -> None:
    names = ", ".join(child.name for child in children)
    sys.stdout.write(
        f"escrowmq is ready ({names}). Name server: {addresses[0]}\n"
        f"Try it: connect any RocketMQ client to {addresses[0]}; "
        f"the messages are in {config.store.root_dir}/broker-0 and so on\n"
    )
    sys.stdout.flush()


# --- metrics -------------------------------------------------------------------------------------


BROKER_UP: Final = Gauge(
    "escrowmq_broker_up", "1 if a broker of this machine is ready, 0 if not.", ("broker",)
)
BROKER_RESTARTS: Final = Counter(
    "escrowmq_broker_restarts_total",
    "Restarts of a broker of this machine after it died.",
    ("broker",),
)


def _child_metrics(children: list[ChildBroker]) -> Iterator[Samples]:
    yield BROKER_UP.samples(((child.name,), int(child.ready.is_set())) for child in children)
    yield BROKER_RESTARTS.samples(((child.name,), child.restarts) for child in children)


class MergedMetrics:
    """Several pages of metrics as one.

    Every sample names its broker by `node_id`, so the samples of one family only have to be
    brought together under one heading.
    """

    def __init__(self) -> None:
        self._headings: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, lines: Iterable[str]) -> None:
        name = ""
        for line in lines:
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                heading = self._headings.setdefault(name, [])
                if len(heading) < 2:  # HELP and TYPE of the first page that has the family
                    heading.append(line)
            elif name:
                self._samples.setdefault(name, []).append(line)

    def lines(self) -> Iterator[str]:
        for name, heading in self._headings.items():
            yield from heading
            yield from self._samples.get(name, ())


class _ClusterMetrics:
    """The page of this process and those of the brokers, as of the last `fetch()`."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self.children: list[ChildBroker] = []
        self._metrics = MergedMetrics()

    async def fetch(self) -> None:
        pages = MergedMetrics()
        if self.registry is not None:
            pages.add(self.registry.lines())
        for child in self.children:
            with contextlib.suppress(NotSent):  # escrowmq_broker_up shows that it is down
                status, body = await child.http_get("/metrics")
                if status == 200:
                    pages.add(body.splitlines(keepends=True))
        self._metrics = pages

    def lines(self) -> Iterator[str]:
        return self._metrics.lines()
