"""`escrowmq serve --brokers N`: N brokers on one machine that clients see as one cluster.

    this process     the name server, the metrics of all, N children to look after
    each child       a broker: broker-a-0 in DATA/broker-0 on port P, the next one on P + 10, …

A broker is one thread of Python, so one process per core is how to use more than one.

One broker of many: a process of its own, started again whenever it dies.

It is on a leash: its standard input is a pipe that only we hold, so it stops in order if we are
gone, however we went. It says on its standard output when it is ready. Its metrics come over a
socket that we opened and it inherits, so no port has to be found for it.
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

from escrowmq.clock import Clock, SystemClock
from escrowmq.config import Config, ResolvedConfig
from escrowmq.errors import ConfigError, EscrowError, NotSent
from escrowmq.metrics import Counter, Family, Gauge, Registry
from escrowmq.secret import Secret
from escrowmq.server.live_config import LiveConfig
from escrowmq.server.metrics import Health, new_registry
from escrowmq.server.namesrv import serve_name_server
from escrowmq.server.security import (
    AccessControl,
    InternalAccount,
    configured_internal_account,
    new_internal_account,
    require_auth_or_loopback,
)
from escrowmq.server.serve import new_live_config, raise_file_limit
from escrowmq.server.tasks import background_tasks
from escrowmq.store.check import is_store
from escrowmq.store.disk import RealDisk
from escrowmq.store.log_files import LogFiles

log = logging.getLogger(__name__)

BACKOFF_S: Final = (0.5, 1, 2, 5, 10, 30)  # before the n-th start in a row
STABLE_RUN_S: Final = 60.0  # who has run so long begins anew with these
FETCH_TIMEOUT_S: Final = 5.0
STOP_TIMEOUT_S: Final = 60.0  # then it is killed
_ACCOUNT_VARIABLE: Final = "ESCROWMQ_INNER_CLIENT_AUTHENTICATION_CREDENTIALS"
_READY: Final = b"escrowmq is ready"
_MAIN_ARGUMENTS: Final = ("-c", "from escrowmq.cli.main import main; main()")


class ChildBroker:
    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        clock: Clock,
        account: tuple[str, Secret] | None = None,
    ) -> None:
        """`account`: whose it is when we ask it. It goes by the environment, which only its own
        user can read; a command line is for everybody."""
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
        self.ready = asyncio.Event()  # it is, now

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self, failed: asyncio.Event) -> None:
        """Until `stop`. `failed` is set if it ended before it was ever ready."""
        in_a_row = 0
        has_been_ready = False
        while not self._is_stopping:
            began_s = self._clock.elapsed_s()
            await self._run_once()
            has_been_ready = has_been_ready or self.ready.is_set()
            self.ready.clear()
            if self._is_stopping:
                return
            if not has_been_ready:
                failed.set()
                return
            in_a_row = 0 if self._clock.elapsed_s() - began_s >= STABLE_RUN_S else in_a_row + 1
            wait_s = BACKOFF_S[min(max(in_a_row - 1, 0), len(BACKOFF_S) - 1)]
            log.error(
                "broker died name=%s exit_code=%d: started again in %s s",
                self.name,
                self.exit_code,
                wait_s,
            )
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> None:
        number = self._socket.fileno()
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_MAIN_ARGUMENTS,
            *self._arguments,
            *("--metrics-socket", str(number)),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            pass_fds=(number,),
            start_new_session=True,  # a Ctrl-C is for us; we stop them in order
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
        """In order, or by force if that takes too long. `running` is its `run`."""
        self._is_stopping = True
        if self._process is None:
            run_task.cancel()  # it waits to be started again
        self.signal(signal.SIGTERM)
        _, late = await asyncio.wait([run_task], timeout=STOP_TIMEOUT_S)
        if late:
            log.error("broker killed name=%s: it did not stop in %d s", self.name, STOP_TIMEOUT_S)
            self.signal(signal.SIGKILL)
            await asyncio.wait([run_task])
        self._socket.close()

    async def http_get(self, path: str) -> tuple[int, str]:
        """Over HTTP. Raises NotSent."""
        if self._process is None:
            raise NotSent(f"{self.name} is not running")
        port = self._socket.getsockname()[1]
        return await asyncio.to_thread(_http_get, port, path, self._account)

    async def not_ready_reason(self) -> str | None:
        if not self.ready.is_set():
            return f"{self.name} is starting"
        try:
            status, body = await self.http_get("/health/ready")
        except NotSent as error:
            return str(error)
        return None if status == 200 else f"{self.name}: {body.strip()}"


def _http_get(port: int, path: str, account: tuple[str, Secret] | None) -> tuple[int, str]:
    """Return status and body. Blocks for at most a few seconds. Raises NotSent."""
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
PORT_STEP = 10  # as RocketMQ's own examples have it
HEALTH_INTERVAL_S = 1.0


def supervise(
    config: Config,
    role: str,
    count: int,
    arguments: Sequence[str],
    resolve: Callable[[], ResolvedConfig] | None = None,
) -> int:
    """Until a signal says stop. `arguments` are those of this command; the brokers get them too."""
    check_no_unserved_store(config.store.root_dir, count)
    live = new_live_config(config, resolve)
    raise_file_limit(config.network.connections_max)
    try:
        require_auth_or_loopback(config)
        return uvloop.run(_supervise(config, role, count, arguments, live))
    except (EscrowError, OSError) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return 2


# --- directories ---------------------------------------------------------------------------------


def broker_directory(root: str | os.PathLike[str], index: int) -> str:
    return os.path.join(root, f"broker-{index}")


def check_no_unserved_store(root: str | os.PathLike[str], count: int) -> None:
    """Messages that no broker of this start would serve."""
    if _has_records(str(root)):
        raise ConfigError(
            f"{root} holds the messages of a single broker, which --brokers would not serve: "
            f"start without --brokers, or move what is in it to {broker_directory(root, 0)}"
        )
    beyond = [index for index in _store_indexes(root) if index >= count]
    if beyond:
        raise ConfigError(
            f"{broker_directory(root, beyond[-1])} holds messages, which --brokers "
            f"{count} would not "
            f"serve: start with --brokers {beyond[-1] + 1}, or move that directory away"
        )


def check_single_broker_store(root: str | os.PathLike[str]) -> None:
    """The same, the other way round: a single broker where many were."""
    many = _store_indexes(root)
    if many and not _has_records(str(root)):
        raise ConfigError(
            f"{root} holds the messages of {many[-1] + 1} brokers, which a single one would not "
            f"serve: start with --brokers {many[-1] + 1}"
        )


def _store_indexes(root: str | os.PathLike[str]) -> list[int]:
    names = RealDisk(root).names("")
    found = [name.removeprefix("broker-") for name in names if name.startswith("broker-")]
    indexes = sorted(int(index) for index in found if index.isdecimal())
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
    stopped, failed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    clock = SystemClock()
    # One account for the brokers towards our name server, and for us towards the brokers. What an
    # operator has set for other name servers must stay theirs, and so serves for both.
    account = configured_internal_account(config)
    if account is None and config.security.is_acl_on:
        account = new_internal_account()
    access = AccessControl(config, account)
    registry, health, pages = new_registry(config, "namesrv"), Health(), _ClusterMetrics()
    children: list[ChildBroker] = []
    async with contextlib.AsyncExitStack() as parts:
        await parts.enter_async_context(
            background_tasks(*(watch.run() for watch in access.watchers))
        )
        if config.metrics.is_enabled:
            from escrowmq.server.http_server import serve_http  # aiohttp: only if it is needed

            served = serve_http(config, clock, pages, health, access, before_render=pages.fetch)
            await parts.enter_async_context(served)
        addresses, own = list(config.broker.namesrv_addresses), None
        if role == "all":
            own = await parts.enter_async_context(
                serve_name_server(clock, access, registry, live_config)
            )
            addresses.insert(0, own)
        handed_on = [*_without_brokers_option(arguments), *(("--own-namesrv", own) if own else ())]
        for index in range(count):
            children.append(_new_child(config, index, addresses, handed_on, clock, account))
        registry.add(lambda: _child_metrics(children))
        pages.registry, pages.children = registry, children
        health.add(lambda: _first_not_ready(children))
        loop.add_signal_handler(signal.SIGHUP, lambda: _reload(live_config, children))
        await parts.enter_async_context(_run_children(children, failed))
        if await _wait_all_ready(children, stopped, failed):
            await parts.enter_async_context(_watch_health(children, health))
            _print_ready(config, addresses, children)
            await _wait_first(stopped)
        log.info("stopping")
        health.reason = "stopping"
    log.info("stopped")
    if failed.is_set():
        sys.stderr.write("escrowmq: a broker could not start, see above\n")
        return 2
    return 1 if any(child.exit_code for child in children) else 0


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
            missing = [await child.not_ready_reason() for child in children]
            health.reason = next((what for what in missing if what is not None), None)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _wait_all_ready(
    children: list[ChildBroker], stopped: asyncio.Event, failed: asyncio.Event
) -> bool:
    async def all_ready() -> None:
        for child in children:
            await child.ready.wait()

    ready = asyncio.create_task(all_ready())
    await _wait_first(stopped, failed, extra_task=ready)
    return not stopped.is_set() and not failed.is_set()


async def _wait_first(*events: asyncio.Event, extra_task: asyncio.Task[None] | None = None) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    tasks: list[asyncio.Task[object]] = [*waits, *([extra_task] if extra_task is not None else [])]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _first_not_ready(children: list[ChildBroker]) -> str | None:
    down = (child.name for child in children if not child.ready.is_set())
    return next((f"{name} is starting" for name in down), None)


def _reload(live_config: LiveConfig, children: list[ChildBroker]) -> None:
    live_config.reload()
    for child in children:
        child.signal(signal.SIGHUP)


def _print_ready(config: Config, addresses: list[str], children: list[ChildBroker]) -> None:
    names = ", ".join(child.name for child in children)
    sys.stdout.write(
        f"escrowmq is ready ({names}). Name server: {addresses[0]}\n"
        f"Try it: point any RocketMQ client at {addresses[0]}; "
        f"messages are kept in {config.store.root_dir}/broker-0 and so on\n"
    )
    sys.stdout.flush()


# --- metrics -------------------------------------------------------------------------------------


def _child_metrics(children: list[ChildBroker]) -> Iterator[Family]:
    yield Gauge(
        "escrowmq_broker_up",
        "Whether a broker of this machine is ready.",
        [({"broker": child.name}, int(child.ready.is_set())) for child in children],
    )
    yield Counter(
        "escrowmq_broker_restarts_total",
        "How often a broker of this machine died and was started again.",
        [({"broker": child.name}, child.restarts) for child in children],
    )


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
    """Our own page and those of the brokers, as they were when somebody last asked."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self.children: list[ChildBroker] = []
        self._metrics = MergedMetrics()

    async def fetch(self) -> None:
        pages = MergedMetrics()
        if self.registry is not None:
            pages.add(self.registry.lines())
        for child in self.children:
            with contextlib.suppress(NotSent):  # escrowmq_broker_up says so
                status, body = await child.http_get("/metrics")
                if status == 200:
                    pages.add(body.splitlines(keepends=True))
        self._metrics = pages

    def lines(self) -> Iterator[str]:
        return self._metrics.lines()
