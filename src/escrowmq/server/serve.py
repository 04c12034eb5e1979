"""`escrowmq serve`: broker and name server in one process, from start to SIGTERM.

The exit code tells whoever started the process what to do next:

    STOPPED       0   it was told to stop, and everything is durable
    FAILED        1   start it again: the store failed, or the start failed for the moment
    NOT_STARTED   2   starting it again does not help: somebody has to change something first
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import uvloop

from escrowmq.broker.broker import Broker
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.client_memory import ClientMemory
from escrowmq.clock import Clock, SteadyClock, SystemClock, local_day
from escrowmq.config import Config, FlushMode, ResolvedConfig
from escrowmq.errors import (
    EscrowError,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreUnavailable,
)
from escrowmq.message.keys import UniqueKeyGenerator, encode_host
from escrowmq.metrics import Registry
from escrowmq.native import NativePath, load_native
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.server.connection_limits import MemoryWatermark, memory_limits
from escrowmq.server.live_config import LiveConfig, RuntimeSettings, configure_logging
from escrowmq.server.metrics import (
    Health,
    access_metrics,
    add_broker_metrics,
    client_memory_metrics,
    new_registry,
    store_metrics,
)
from escrowmq.server.namesrv import Registrar, new_registrars, serve_name_server
from escrowmq.server.remoting_server import (
    ConnectionWrapper,
    RemotingServer,
    bind,
    bound_port,
    reachable_host,
)
from escrowmq.server.security import (
    AccessControl,
    configured_internal_account,
    require_auth_or_loopback,
)
from escrowmq.server.tasks import (
    GroupCommit,
    StoreMaintenance,
    Ticker,
    background_tasks,
    repeat,
)
from escrowmq.store.disk import Disk, RealDisk
from escrowmq.store.retention import update_disk_state
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

STOPPED: Final = 0
FAILED: Final = 1
NOT_STARTED: Final = 2

SWEEP_INTERVAL_S = 1.0
FAILED_STOP_S = 0.7  # to refuse what waits for an answer
RESERVED_FILES = 1024  # of the store and the name server; each connection needs one more
DISK_FULL_HINT = (
    "Nothing is lost, but starting needs disk space: free 64 MiB in {directory}, or more if its "
    "consume queues have to be rebuilt (60 bytes per message), and start again"
)
# With Python's default of 5 ms, the thread of a checkpoint could delay a turn by that much.
SWITCH_INTERVAL_S = 0.0005


def run(
    resolved: ResolvedConfig,
    role: str,
    file: Path | None = None,
    resolve: Callable[[], ResolvedConfig] | None = None,
    metrics_fd: int | None = None,
    own_namesrv: str | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code, see above.

    `file` receives settings that an operator changes; `resolve` reads the configuration again.
    With `metrics_fd` this is a broker of a supervisor: metrics are served on that socket, the end
    of standard input stops it, and `own_namesrv` is the supervisor's name server.
    """
    config = resolved.config
    live_config = new_live_config(config, resolve, is_supervised=metrics_fd is not None)
    runtime_settings = RuntimeSettings(live_config, resolved.origins, file)
    raise_file_limit(config.network.connections_max)
    try:
        require_auth_or_loopback(config)
        return uvloop.run(
            _serve(config, role, live_config, runtime_settings, metrics_fd, own_namesrv)
        )
    except (EscrowError, OSError, MemoryError) as error:
        return report_start_error(error, config.store.root_dir)


# A wrong path, a missing permission or a port that is taken. Errors such as EIO, EMFILE or ENOSPC
# may be gone at the next start.
_LASTING_ERRORS: Final = frozenset(
    (
        *(errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENODEV, errno.ENXIO),
        *(errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT),
    )
)


def report_start_error(error: Exception, directory: str | os.PathLike[str]) -> int:
    """Say on standard error why a start failed, and return the exit code."""
    text = str(error) or type(error).__name__
    if isinstance(error, StoreFull):
        text += f". {DISK_FULL_HINT.format(directory=directory)}"
    sys.stderr.write(f"escrowmq: {text}\n")
    if isinstance(error, StoreLocked | StoreDamaged):
        return NOT_STARTED
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, OSError):  # gaierror has numbers of its own, below zero
        is_lasting = cause.errno in _LASTING_ERRORS or (cause.errno or -1) < 0
        return NOT_STARTED if is_lasting else FAILED
    return FAILED if isinstance(error, StoreError | MemoryError) else NOT_STARTED


def new_live_config(
    config: Config, resolve: Callable[[], ResolvedConfig] | None, *, is_supervised: bool = False
) -> LiveConfig:
    """Return a LiveConfig; logging is configured now and after each change."""
    live_config = LiveConfig(config, resolve)

    def configure(changed: Config) -> None:
        configure_logging(changed.log, changed.broker.broker_name, is_supervised=is_supervised)

    configure(config)
    live_config.add_listener(configure)
    return live_config


def raise_file_limit(connections_max: int) -> None:
    """Allow as many open files as the system permits: each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems refuse the limit that they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < connections_max + RESERVED_FILES:
        log.warning(
            "the limit of %d open files is too low for escrowConnectionsMax=%d; raise ulimit -n",
            hard,
            connections_max,
        )


async def _serve(
    config: Config,
    role: str,
    live_config: LiveConfig,
    runtime_settings: RuntimeSettings,
    metrics_fd: int | None,
    own_namesrv: str | None,
) -> int:
    stopped, failed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, live_config.reload)
    if metrics_fd is not None:
        _stop_with_supervisor(loop, stopped)
    servers = run_servers(
        live_config,
        runtime_settings,
        failed,
        role=role,
        metrics_fd=metrics_fd,
        own_namesrv=own_namesrv,
    )
    async with servers as running:
        _print_ready(config, role, running.namesrv_address)
        _tune_interpreter()
        waits = [asyncio.create_task(event.wait()) for event in (stopped, failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if failed.is_set():
            exit_within(FAILED_STOP_S)
        log.info("stopping")
        running.health.reason = "stopping"
    log.info("stopped")
    return FAILED if failed.is_set() else STOPPED


@dataclass(frozen=True, slots=True)
class RunningBroker:
    """A broker that is served on a port. Use it on its event loop only."""

    broker: Broker
    server: RemotingServer
    address: str


@dataclass(frozen=True, slots=True)
class RunningServers:
    """What `run_servers` has started. Without a broker or a name server they are None."""

    health: Health
    namesrv_address: str | None
    broker: RunningBroker | None


@contextlib.asynccontextmanager
async def run_servers(
    live_config: LiveConfig,
    runtime_settings: RuntimeSettings,
    failed: asyncio.Event,
    *,
    role: str = "all",
    metrics_fd: int | None = None,
    own_namesrv: str | None = None,
    wrap_connection: ConnectionWrapper | None = None,
) -> AsyncIterator[RunningServers]:
    """Run name server and broker on the event loop of the caller until the block ends.

    This changes nothing else in the process: no signals, no log, no limits. `failed` is set if a
    part cannot go on. The end of the block stops everything cleanly. If the block raises, the
    connections and the store are left as by a process that was killed. Raises EscrowError or
    OSError if they cannot start.
    """
    config, clock = live_config.config, SystemClock()
    access = AccessControl(
        config, configured_internal_account(config) if metrics_fd is not None else None
    )
    registry, health = new_registry(config, role), Health()
    registry.add(access_metrics(access))
    watermark = _new_watermark(config, registry)
    async with contextlib.AsyncExitStack() as parts:
        await parts.enter_async_context(
            background_tasks(failed, *(watcher.run() for watcher in access.watchers))
        )
        if config.metrics.is_enabled or metrics_fd is not None:
            from escrowmq.server.http_server import serve_http  # aiohttp: only if it is needed

            http = serve_http(config, clock, registry, health, access, metrics_fd)
            await parts.enter_async_context(http)
        namesrv_address, running_broker = own_namesrv, None
        if role in ("all", "namesrv"):
            name_server = serve_name_server(
                clock, access, registry, live_config, failed, watermark, wrap_connection
            )
            namesrv_address = await parts.enter_async_context(name_server)
        if role in ("all", "broker"):
            own_addresses = [namesrv_address] if namesrv_address is not None else []
            # Ready means that clients find the broker through its own name server.
            required = 1 if metrics_fd is not None else len(own_addresses)
            broker = _run_broker(
                clock,
                access,
                own_addresses,
                failed,
                registry,
                health,
                live_config,
                runtime_settings,
                required,
                watermark,
                wrap_connection,
            )
            running_broker = await parts.enter_async_context(broker)
        health.reason = None
        yield RunningServers(health, namesrv_address, running_broker)


def _tune_interpreter() -> None:
    # Everything created so far lives as long as the process; the collector need not visit it.
    gc.collect()
    gc.freeze()
    # Objects of a turn are freed by reference counting. What is kept is looked at twice, little at
    # a time: 20,000 new objects took 2 to 6 ms when many members joined.
    gc.set_threshold(1_000, 10, 4_000)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def exit_within(seconds: float) -> None:
    """End the process after a failure, even if a thread hangs in a call to a broken disk.

    Nothing is lost by that: after a failure nothing is saved any more, and the next start reads
    what is on the disk.
    """
    timer = threading.Timer(seconds, os._exit, [FAILED])
    timer.daemon = True
    timer.start()


def _new_watermark(config: Config, registry: Registry) -> MemoryWatermark:
    """Return the watermark of the process: its ports share the memory."""
    watermark = MemoryWatermark(ClientMemory(memory_limits(config.network)))
    registry.add(client_memory_metrics(watermark))
    return watermark


def _stop_with_supervisor(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Stop when the supervisor is gone: it holds the other end of standard input open."""
    stdin = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(stdin)
        stopped.set()

    loop.add_reader(stdin, ended)


@contextlib.asynccontextmanager
async def _run_broker(
    clock: Clock,
    access: AccessControl,
    namesrv_addresses: list[str],
    failed: asyncio.Event,
    registry: Registry,
    health: Health,
    live_config: LiveConfig,
    runtime_settings: RuntimeSettings,
    required_registrations: int,
    watermark: MemoryWatermark,
    wrap_connection: ConnectionWrapper | None,
) -> AsyncIterator[RunningBroker]:
    config = live_config.config
    disk = RealDisk(config.store.root_dir)
    address = config.broker.advertised_address or reachable_host(config.network.bind_address)
    # The port comes first: it is part of the id of every message.
    listening_socket = bind(config.network.bind_address, config.network.listen_port)
    port = bound_port(listening_socket)
    store_host = encode_host(address, port)
    native = load_native(is_enabled=config.broker.native_enabled)
    store = _open_store(config, disk, store_host, listening_socket, native)
    group_commit = GroupCommit(store, timeout_s=config.store.sync_flush_timeout_s)
    registrars: list[Registrar] = []
    wall, clock = clock, SteadyClock(clock)
    maintenance = StoreMaintenance(store, disk, clock, config.store)
    broker = Broker(
        disk,
        store,
        config,
        _unique_keys(address),
        store_host=store_host,
        version=f"EscrowMQ_{version('escrowmq')}",
        when_flushed=group_commit.when_flushed if _is_sync(config) else None,
        on_topics_changed=lambda: _report_topics_changed(registrars),
        flush=group_commit.when_flushed,
        counters=BrokerCounters(clock.elapsed_s),
        access_validator=access.validator,
        day_of=local_day,
        wall_ms=lambda now_ms: wall.now_ms(),
        memory=watermark.memory,
        elapsed_s=clock.elapsed_s,
        past_times=maintenance.past_times(),
        native=native,
    )
    server = _new_server(config, clock, broker, access, store_host, watermark, wrap_connection)
    _connect_parts(broker, server, maintenance, live_config, runtime_settings)
    await server.listen(listening_socket)
    registrars += new_registrars(
        config, broker, f"{address}:{port}", namesrv_addresses, access.internal_signer
    )
    maintenance.keep_needed_segments(
        oldest_needed_offset=broker.oldest_needed_offset,
        move_messages_below=lambda end: broker.move_messages_below(end, clock.now_ms()),
    )
    add_broker_metrics(registry, config, wall, clock, broker, server)
    registry.add(store_metrics(disk, group_commit, maintenance))
    health.add(lambda: None if store.is_writable else "the store accepts no messages")
    tasks = background_tasks(
        failed,
        *(registrar.run() for registrar in registrars),
        *_background_loops(config, clock, broker, server, maintenance, failed),
    )
    async with _abandon_on_error(server, group_commit, store), tasks:
        bound = config.network.bind_address, port
        log.info("broker listens address=%s:%d path=%s", *bound, native.description)
        await _wait_registered(registrars[:required_registrations], failed)
        yield RunningBroker(broker, server, f"{address}:{port}")
    if not await _stop(broker, server, group_commit, maintenance, clock):
        failed.set()


@contextlib.asynccontextmanager
async def _abandon_on_error(
    server: RemotingServer, group_commit: GroupCommit, store: MessageStore
) -> AsyncIterator[None]:
    """If the block raises, leave everything as it is, like a process that was killed."""
    try:
        yield
    except BaseException:
        await server.abort()
        await group_commit.close()  # its thread uses the files
        store.abandon()
        raise


async def _wait_registered(registrars: list[Registrar], failed: asyncio.Event) -> None:
    """Wait until all of them have registered the broker, or until something has failed."""
    waits = [asyncio.create_task(registrar.registered.wait()) for registrar in registrars]
    failure = asyncio.create_task(failed.wait())
    for wait in waits:
        await asyncio.wait([wait, failure], return_when=asyncio.FIRST_COMPLETED)
    for task in (*waits, failure):
        task.cancel()


def _new_server(
    config: Config,
    clock: Clock,
    broker: Broker,
    access: AccessControl,
    store_host: bytes,
    watermark: MemoryWatermark,
    wrap_connection: ConnectionWrapper | None,
) -> RemotingServer:
    return RemotingServer(
        broker,
        clock,
        config.network,
        tls=access.tls,
        requires_tls=config.security.requires_tls,
        keeps_headers=access.validator is not None,
        send_response_encoder=SendResponseEncoder(
            store_host=store_host, region=config.broker.region_id, trace_on=config.broker.trace_on
        ),
        watermark=watermark,
        plain_requests=broker.native_requests,
        wrap_connection=wrap_connection,
    )


def _is_sync(config: Config) -> bool:
    return config.store.flush_mode is FlushMode.SYNC


def _report_topics_changed(registrars: list[Registrar]) -> None:
    for registrar in registrars:
        registrar.topics_changed()


def _connect_parts(
    broker: Broker,
    server: RemotingServer,
    maintenance: StoreMaintenance,
    live_config: LiveConfig,
    runtime_settings: RuntimeSettings,
) -> None:
    broker.clock_report = maintenance.clock_report
    broker.settings = runtime_settings
    broker.counters.turn_start_s = lambda: server.turn_start_s
    live_config.add_listener(lambda changed: _apply_config(changed, broker, server))


def _apply_config(config: Config, broker: Broker, server: RemotingServer) -> None:
    server.change_config(config.network)
    broker.change_config(config)


def _unique_keys(address: str) -> UniqueKeyGenerator:
    return UniqueKeyGenerator(address=address, process_id=os.getpid(), salt=secrets.randbits(32))


def _open_store(
    config: Config,
    disk: Disk,
    store_host: bytes,
    listening_socket: socket.socket,
    native: NativePath,
) -> MessageStore:
    try:
        store = MessageStore.open(
            disk,
            config.store,
            store_host=store_host,
            delay_levels_ms=config.delay.delay_levels_ms,
            native=native,
        )
    except EscrowError:
        listening_socket.close()
        raise
    update_disk_state(store, disk.usage())
    log.info(
        "store open directory=%s begin=%d end=%d records_read=%d",
        config.store.root_dir,
        store.begin,
        store.end,
        store.recovery.records,
    )
    return store


async def _stop(
    broker: Broker,
    server: RemotingServer,
    group_commit: GroupCommit,
    maintenance: StoreMaintenance,
    clock: Clock,
) -> bool:
    """Respond to the requests that were accepted, then make everything durable.

    Return False if the store has failed or fails now. Then requests are refused, and nothing is
    saved: offsets and snapshots must not be ahead of the log.
    """
    server.stop_reading()
    broker.pull_processor.release_all()
    server.end_turn()  # append what was accepted; under SYNC_FLUSH the flush below responds
    await group_commit.close()
    await server.close()
    try:
        broker.store.flush()
    except StoreError as error:
        log.error("the log could not be flushed at shutdown: %s", error)
        broker.store.abandon()
        return False
    try:
        broker.save()
        broker.transactions.save(force=True)
        maintenance.save_ages()
    except StoreError as error:  # the log is safe; the tables were saved a moment ago
        log.warning("topics, groups or offsets not saved at shutdown: %s", error)
    try:
        broker.store.close()
    except (StoreFull, StoreUnavailable) as error:
        log.warning("no checkpoint at shutdown, the next start reads the log again: %s", error)
    except StoreError as error:
        log.error("the store failed at shutdown: %s", error)
        return False
    return True


def _background_loops(
    config: Config,
    clock: Clock,
    broker: Broker,
    server: RemotingServer,
    maintenance: StoreMaintenance,
    failed: asyncio.Event,
) -> list[Any]:
    def tick() -> None:
        broker.tick(clock.now_ms())
        server.schedule_turn()

    async def stop_with_store() -> None:
        await maintenance.store_failed.wait()
        log.error("the store has failed; start again, recovery reads what is on the disk")
        failed.set()

    tick_interval_ms = round(config.delay.tick_interval_s * 1000)
    ticker = Ticker(lambda: broker.next_tick_ms(clock.now_ms(), tick_interval_ms))
    server.on_turn_end = ticker.turn_ended
    offsets_interval_s = config.consume.offsets_interval_ms / 1000
    delays_interval_s = config.delay.delay_offsets_interval_ms / 1000
    return [
        repeat("tick", tick, ticker.pause),
        repeat("sweep of connections", server.sweep_connections, SWEEP_INTERVAL_S),
        repeat("saving offsets", broker.save_offsets, offsets_interval_s),
        repeat("saving delays", broker.save_delayed_messages, delays_interval_s),
        stop_with_store(),
        maintenance.run(),
    ]


def _print_ready(config: Config, role: str, namesrv_address: str | None) -> None:
    servers = namesrv_address or ";".join(config.broker.namesrv_addresses)
    sys.stdout.write(
        f"escrowmq is ready ({role}). Name server: {servers}\n"
        f"Try it: connect any RocketMQ client to {servers}; "
        f"show the stored messages with: escrowmq store dump {config.store.root_dir}\n"
    )
    sys.stdout.flush()
