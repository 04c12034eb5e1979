"""`escrowmq serve`: broker and name server in one process, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from escrowmq.broker.broker import Broker
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.clock import Clock, SteadyClock, SystemClock, local_day
from escrowmq.config import Config, FlushMode, ResolvedConfig
from escrowmq.errors import EscrowError, StoreError, StoreFull
from escrowmq.message.keys import UniqueKeyGenerator, encode_host
from escrowmq.metrics import Registry
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.server.live_config import LiveConfig, RuntimeSettings, configure_logging
from escrowmq.server.metrics import (
    Health,
    access_metrics,
    add_broker_metrics,
    new_registry,
    store_metrics,
)
from escrowmq.server.namesrv import Registrar, new_registrars, serve_name_server
from escrowmq.server.remoting_server import RemotingServer, bind, bound_port, reachable_host
from escrowmq.server.security import (
    AccessControl,
    configured_internal_account,
    require_auth_or_loopback,
)
from escrowmq.server.tasks import GroupCommit, StoreMaintenance, background_tasks
from escrowmq.store.disk import Disk, RealDisk
from escrowmq.store.retention import update_disk_state
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 1.0
RESERVED_FILES = 1024  # of the store and the name server, beside those of connections
DISK_FULL_HINT = (
    "Nothing is lost, but a start has to write there: make 64 MiB of room in {place}, or more if "
    "its queues have to be built anew (60 bytes for each message), and start again"
)
SWITCH_INTERVAL_S = 0.0005  # a checkpoint's thread must not hold a turn up for Python's usual 5 ms


def run(
    resolved: ResolvedConfig,
    role: str,
    file: Path | None = None,
    resolve: Callable[[], ResolvedConfig] | None = None,
    metrics_fd: int | None = None,
    own_namesrv: str | None = None,
) -> int:
    """Serve until a signal says stop. 0: stopped in order; 2: could not start; 1: failed.

    `file` is where changes of the settings are kept; `reread` says what they are now. With a
    `metrics_socket` this is one of many brokers (supervise.py): metrics are served on it, and the
    end of standard input is a stop; `own_namesrv` is the name server of its supervisor.
    """
    config = resolved.config
    live = new_live_config(config, resolve, is_supervised=metrics_fd is not None)
    online = RuntimeSettings(live, resolved.origins, file)
    raise_file_limit(config.network.connections_max)
    try:
        require_auth_or_loopback(config)
        return uvloop.run(_serve(config, role, live, online, metrics_fd, own_namesrv))
    except StoreFull as error:
        place = config.store.root_dir
        sys.stderr.write(f"escrowmq: {error}. {DISK_FULL_HINT.format(place=place)}\n")
        return 2
    except (EscrowError, OSError) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return 2


def new_live_config(
    config: Config, resolve: Callable[[], ResolvedConfig] | None, *, is_supervised: bool = False
) -> LiveConfig:
    """With the log lines set up, now and after each change."""
    live = LiveConfig(config, resolve)

    def set_up(now: Config) -> None:
        configure_logging(now.log, now.broker.broker_name, is_supervised=is_supervised)

    set_up(config)
    live.add_listener(set_up)
    return live


def raise_file_limit(connections_max: int) -> None:
    """A connection is an open file: as many as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not every system allows what it says it does
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < connections_max + RESERVED_FILES:
        log.warning(
            "only %d files may be open: not enough for escrowConnectionsMax=%d",
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
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, live_config.reload)
    if metrics_fd is not None:
        _stop_with_supervisor(loop, stopped)
    clock = SystemClock()
    access = AccessControl(
        config, configured_internal_account(config) if metrics_fd is not None else None
    )
    registry, health = new_registry(config, role), Health()
    registry.add(access_metrics(access))
    async with contextlib.AsyncExitStack() as parts:
        await parts.enter_async_context(
            background_tasks(*(watch.run() for watch in access.watchers))
        )
        if config.metrics.is_enabled or metrics_fd is not None:
            from escrowmq.server.http_server import serve_http  # aiohttp: only if it is needed

            served = serve_http(config, clock, registry, health, access, metrics_fd)
            await parts.enter_async_context(served)
        namesrv_address = own_namesrv
        if role in ("all", "namesrv"):
            names = serve_name_server(clock, access, registry, live_config)
            namesrv_address = await parts.enter_async_context(names)
        failed = asyncio.Event()
        if role in ("all", "broker"):
            own = [namesrv_address] if namesrv_address is not None else []
            needed = 1 if metrics_fd is not None else len(own)  # name servers that know of it
            broker = _run_broker(
                clock, access, own, failed, registry, health, live_config, runtime_settings, needed
            )
            await parts.enter_async_context(broker)
        health.reason = None
        _print_ready(config, role, namesrv_address)
        # Everything made so far lives as long as the process: keep the collector off it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)  # what a turn makes is gone by its end, without help
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        waits = [asyncio.create_task(event.wait()) for event in (stopped, failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        log.info("stopping")
        health.reason = "stopping"
    log.info("stopped")
    return 1 if failed.is_set() else 0


def _stop_with_supervisor(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """It holds the other end of our standard input and writes nothing: we can only read the end."""
    number = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(number)
        stopped.set()

    loop.add_reader(number, ended)


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
) -> AsyncIterator[None]:
    config = live_config.config
    disk = RealDisk(config.store.root_dir)
    address = config.broker.advertised_address or reachable_host(config.network.bind_address)
    bound = bind(config.network.bind_address, config.network.listen_port)
    number = bound_port(bound)  # first of all: it is in the id of every message
    host = encode_host(address, number)
    store = _open_store(config, disk, host, bound)
    group = GroupCommit(store, timeout_s=config.store.sync_flush_timeout_s)
    registrars: list[Registrar] = []
    wall, clock = clock, SteadyClock(clock, not_before_ms=store.last_stored_ms)
    broker = Broker(
        disk,
        store,
        config,
        _unique_keys(address),
        store_host=host,
        version=f"EscrowMQ_{version('escrowmq')}",
        when_flushed=group.when_flushed if config.store.flush_mode is FlushMode.SYNC else None,
        on_topics_changed=lambda: _report_topics_changed(registrars),
        flush=group.when_flushed,
        counters=BrokerCounters(clock.elapsed_s),
        access_validator=access.validator,
        day_of=local_day,
        wall_ms=lambda now_ms: wall.now_ms(),
    )
    port = RemotingServer(
        broker,
        clock,
        config.network,
        tls=access.tls,
        requires_tls=config.security.requires_tls,
        keeps_headers=access.validator is not None,
        send_response_encoder=SendResponseEncoder(
            store_host=host, region=config.broker.region_id, trace_on=config.broker.trace_on
        ),
    )
    _connect_parts(broker, port, live_config, runtime_settings)
    await port.listen(bound)
    place, signer = f"{address}:{number}", access.internal_signer
    registrars += new_registrars(config, broker, place, namesrv_addresses, signer)
    update_disk_state(store, disk.usage())
    upkeep = _new_maintenance(config, clock, broker, disk)
    add_broker_metrics(registry, config, wall, broker, port)
    registry.add(store_metrics(disk, group, upkeep))
    health.add(lambda: None if store.is_writable else "the store takes no messages")
    loops = [one.run() for one in registrars]
    async with background_tasks(
        *loops, *_background_loops(config, clock, broker, port, upkeep, failed)
    ):
        log.info("broker listens address=%s:%d", config.network.bind_address, number)
        await _wait_registered(registrars[:required_registrations])
        yield
    await _stop(broker, port, group, clock)


async def _wait_registered(registrars: list[Registrar]) -> None:
    for registrar in registrars:
        await registrar.registered.wait()


def _report_topics_changed(registrars: list[Registrar]) -> None:
    for registrar in registrars:
        registrar.topics_changed()


def _connect_parts(
    broker: Broker,
    server: RemotingServer,
    live_config: LiveConfig,
    runtime_settings: RuntimeSettings,
) -> None:
    broker.settings = runtime_settings
    broker.counters.turn_start_s = lambda: server.turn_start_s
    live_config.add_listener(lambda now: _apply_config(now, broker, server))


def _apply_config(config: Config, broker: Broker, server: RemotingServer) -> None:
    server.change_config(config.network)
    broker.change_config(config)


def _unique_keys(address: str) -> UniqueKeyGenerator:
    return UniqueKeyGenerator(address=address, process_id=os.getpid(), salt=secrets.randbits(32))


def _open_store(config: Config, disk: Disk, host: bytes, bound: socket.socket) -> MessageStore:
    try:
        store = MessageStore.open(disk, config.store, store_host=host)
    except EscrowError:
        bound.close()
        raise
    log.info(
        "store open directory=%s begin=%d end=%d walked=%d",
        config.store.root_dir,
        store.begin,
        store.end,
        store.recovery.records,
    )
    return store


def _new_maintenance(config: Config, clock: Clock, broker: Broker, disk: Disk) -> StoreMaintenance:
    return StoreMaintenance(
        broker.store,
        disk,
        clock,
        config.store,
        oldest_needed_offset=broker.transactions.oldest_needed_offset,
        move_halves_below=lambda end: broker.transactions.move_halves_below(end, clock.now_ms()),
    )


async def _stop(
    broker: Broker, server: RemotingServer, group_commit: GroupCommit, clock: Clock
) -> None:
    """Answer what is under way, then make everything durable."""
    server.stop_reading()
    broker.pull_processor.release_all(clock.now_ms())
    server.end_turn()  # appends what was accepted; with sync flush, its answers come with the flush
    await group_commit.close()
    await server.close()
    broker.store.flush()  # before it is noted what has been delivered
    try:
        broker.save()
        broker.transactions.save(force=True)
    except StoreError as error:  # derived, or saved a moment ago: the log itself is safe
        log.warning("configuration not saved at the stop: %s", error)
    try:
        broker.store.close()
    except StoreFull as error:
        log.warning("no checkpoint at the stop, the next start reads the log again: %s", error)


def _background_loops(
    config: Config,
    clock: Clock,
    broker: Broker,
    server: RemotingServer,
    maintenance: StoreMaintenance,
    failed: asyncio.Event,
) -> list[Any]:
    async def tick() -> None:
        while True:
            await asyncio.sleep(config.delay.tick_interval_s)
            broker.tick(clock.now_ms())
            server.schedule_turn()

    async def look_after_lines() -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            server.sweep_connections()

    async def save(what: str, step: Callable[[], None], interval_ms: int) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                step()
            except StoreError as error:
                log.warning("%s not saved: %s", what, error)

    async def keep_store() -> None:
        await maintenance.run()  # ends only when the store has failed
        failed.set()

    return [
        tick(),
        look_after_lines(),
        save("offsets", broker.save_offsets, config.consume.offsets_interval_ms),
        save("delays", broker.save_delayed_messages, config.delay.delay_offsets_interval_ms),
        keep_store(),
    ]


def _print_ready(config: Config, role: str, namesrv_address: str | None) -> None:
    where = namesrv_address or ";".join(config.broker.namesrv_addresses)
    sys.stdout.write(
        f"escrowmq is ready ({role}). Name server: {where}\n"
        f"Try it: point any RocketMQ client at {where}; "
        f"look at the messages with: escrowmq store dump {config.store.root_dir}\n"
    )
    sys.stdout.flush()
