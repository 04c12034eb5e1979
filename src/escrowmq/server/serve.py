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
from pathlib import Path
from typing import Any

import uvloop

from escrowmq.broker.broker import Broker
from escrowmq.broker.statistics import Counts
from escrowmq.clock import Clock, SteadyClock, SystemClock, local_day
from escrowmq.config import Config, FlushMode, Resolved
from escrowmq.errors import EscrowError, StoreError, StoreFull
from escrowmq.message.keys import UniqueKeys, encode_host
from escrowmq.metrics import Registry
from escrowmq.server.http_server import Health, serving
from escrowmq.server.live_config import LiveSettings, OnlineSettings, set_up_logs
from escrowmq.server.metrics import access_metrics, add_broker_metrics, registry_of, store_metrics
from escrowmq.server.namesrv import Registrar, name_server, registrars_of
from escrowmq.server.remoting_server import Port, bind, port_of, reachable
from escrowmq.server.rules import (
    broker_rules,
    port_limits,
    port_security,
    store_settings,
    tick_interval_s,
    upkeep_settings,
)
from escrowmq.server.security import Access, inner_account, refuse_open_doors
from escrowmq.server.tasks import GroupCommit, Upkeep, running
from escrowmq.store.disk import Disk, RealDisk
from escrowmq.store.retention import look_for_room
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

LINES_S = 1.0
OWN_FILES = 1024  # of the store and the name server, beside those of connections
NO_ROOM = (
    "Nothing is lost, but a start has to write there: make 64 MiB of room in {place}, or more if "
    "its queues have to be built anew (60 bytes for each message), and start again"
)
SWITCH_S = 0.0005  # a checkpoint's thread must not hold a turn up for Python's usual 5 ms


def run(
    resolved: Resolved,
    role: str,
    file: Path | None = None,
    reread: Callable[[], Resolved] | None = None,
    metrics_socket: int | None = None,
    own_namesrv: str | None = None,
) -> int:
    """Serve until a signal says stop. 0: stopped in order; 2: could not start; 1: failed.

    `file` is where changes of the settings are kept; `reread` says what they are now. With a
    `metrics_socket` this is one of many brokers (supervise.py): metrics are served on it, and the
    end of standard input is a stop; `own_namesrv` is the name server of its supervisor.
    """
    config = resolved.config
    live = live_settings(config, reread, is_one_of_many=metrics_socket is not None)
    online = OnlineSettings(live, resolved.origins, file)
    allow_files(config.network.connections_max)
    try:
        refuse_open_doors(config)
        return uvloop.run(_serve(config, role, live, online, metrics_socket, own_namesrv))
    except StoreFull as error:
        place = config.store.root_dir
        sys.stderr.write(f"escrowmq: {error}. {NO_ROOM.format(place=place)}\n")
        return 2
    except (EscrowError, OSError) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return 2


def live_settings(
    config: Config, reread: Callable[[], Resolved] | None, *, is_one_of_many: bool = False
) -> LiveSettings:
    """With the log lines set up, now and after each change."""
    live = LiveSettings(config, reread)

    def set_up(now: Config) -> None:
        set_up_logs(now.log, now.broker.broker_name, is_one_of_many=is_one_of_many)

    set_up(config)
    live.add(set_up)
    return live


def allow_files(connections_max: int) -> None:
    """A connection is an open file: as many as the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not every system allows what it says it does
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < connections_max + OWN_FILES:
        log.warning(
            "only %d files may be open: not enough for escrowConnectionsMax=%d",
            hard,
            connections_max,
        )


async def _serve(
    config: Config,
    role: str,
    live: LiveSettings,
    online: OnlineSettings,
    metrics_socket: int | None,
    own_namesrv: str | None,
) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, live.read_again)
    if metrics_socket is not None:
        _stop_with_our_supervisor(loop, stopped)
    clock = SystemClock()
    access = Access(config, inner_account(config) if metrics_socket is not None else None)
    registry, health = registry_of(config, role), Health()
    registry.add(access_metrics(access))
    async with contextlib.AsyncExitStack() as parts:
        await parts.enter_async_context(running(*(watch.run() for watch in access.watches)))
        if config.metrics.is_on or metrics_socket is not None:
            served = serving(config, clock, registry, health, access, metrics_socket)
            await parts.enter_async_context(served)
        namesrv_address = own_namesrv
        if role in ("all", "namesrv"):
            names = name_server(clock, access, registry, live)
            namesrv_address = await parts.enter_async_context(names)
        failed = asyncio.Event()
        if role in ("all", "broker"):
            own = [namesrv_address] if namesrv_address is not None else []
            needed = 1 if metrics_socket is not None else len(own)  # name servers that know of it
            broker = _broker(clock, access, own, failed, registry, health, live, online, needed)
            await parts.enter_async_context(broker)
        health.missing = None
        _say_ready(config, role, namesrv_address)
        # Everything made so far lives as long as the process: keep the collector off it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)  # what a turn makes is gone by its end, without help
        sys.setswitchinterval(SWITCH_S)
        waits = [asyncio.create_task(event.wait()) for event in (stopped, failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        log.info("stopping")
        health.missing = "stopping"
    log.info("stopped")
    return 1 if failed.is_set() else 0


def _stop_with_our_supervisor(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """It holds the other end of our standard input and writes nothing: we can only read the end."""
    number = sys.stdin.fileno()

    def ended() -> None:
        loop.remove_reader(number)
        stopped.set()

    loop.add_reader(number, ended)


@contextlib.asynccontextmanager
async def _broker(
    clock: Clock,
    access: Access,
    namesrv_addresses: list[str],
    failed: asyncio.Event,
    registry: Registry,
    health: Health,
    live: LiveSettings,
    online: OnlineSettings,
    needed: int,
) -> AsyncIterator[None]:
    config = live.config
    disk = RealDisk(config.store.root_dir)
    address = config.broker.advertised_address or reachable(config.network.bind_address)
    bound = bind(config.network.bind_address, config.network.listen_port)
    number = port_of(bound)  # first of all: it is in the id of every message
    host = encode_host(address, number)
    store = _open_store(config, disk, host, bound)
    group = GroupCommit(store, wait_s=config.store.sync_flush_timeout_ms / 1000)
    registrars: list[Registrar] = []
    wall, clock = clock, SteadyClock(clock, not_before_ms=store.last_stored_ms)
    broker = Broker(
        disk,
        store,
        broker_rules(config, host),
        _unique_keys(address),
        when_flushed=group.when_flushed if config.store.flush_mode is FlushMode.SYNC else None,
        topics_changed=lambda: _tell(registrars),
        flush=group.when_flushed,
        counts=Counts(clock.elapsed_s),
        guard=access.guard,
        day_of=local_day,
        wall_ms=lambda now_ms: wall.now_ms(),
    )
    port = Port(broker, clock, port_limits(config), port_security(config, access))
    _tie(broker, port, live, online, host)
    await port.listen(bound)
    place, signer = f"{address}:{number}", access.own_signer
    registrars += registrars_of(config, broker, place, namesrv_addresses, signer)
    look_for_room(store, disk.usage())
    upkeep = _upkeep(config, clock, broker, disk)
    add_broker_metrics(registry, config, wall, broker, port)
    registry.add(store_metrics(disk, group, upkeep))
    health.add(lambda: None if store.takes_writes else "the store takes no messages")
    loops = [one.run() for one in registrars]
    async with running(*loops, *_loops(config, clock, broker, port, upkeep, failed)):
        log.info("broker listens address=%s:%d", config.network.bind_address, number)
        await _registered(registrars[:needed])
        yield
    await _stop(broker, port, group, clock)


async def _registered(registrars: list[Registrar]) -> None:
    for registrar in registrars:
        await registrar.registered.wait()


def _tell(registrars: list[Registrar]) -> None:
    for registrar in registrars:
        registrar.changed()


def _tie(
    broker: Broker, port: Port, live: LiveSettings, online: OnlineSettings, host: bytes
) -> None:
    broker.settings = online
    broker.counts.turn_began_s = lambda: port.turn_s
    live.add(lambda now: _apply(now, broker, port, host))


def _apply(config: Config, broker: Broker, port: Port, host: bytes) -> None:
    port.change_limits(port_limits(config))
    broker.store.change_settings(store_settings(config))
    broker.change_rules(broker_rules(config, host))
    broker.clients.allows_sql = config.consume.filters_by_sql


def _unique_keys(address: str) -> UniqueKeys:
    return UniqueKeys(address=address, process_id=os.getpid(), salt=secrets.randbits(32))


def _open_store(config: Config, disk: Disk, host: bytes, bound: socket.socket) -> MessageStore:
    try:
        store = MessageStore.open(disk, store_settings(config), store_host=host)
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


def _upkeep(config: Config, clock: Clock, broker: Broker, disk: Disk) -> Upkeep:
    return Upkeep(
        broker.store,
        disk,
        clock,
        upkeep_settings(config),
        keep_from=broker.transactions.keep_from,
        make_way=lambda end: broker.transactions.make_way(end, clock.now_ms()),
    )


async def _stop(broker: Broker, port: Port, group: GroupCommit, clock: Clock) -> None:
    """Answer what is under way, then make everything durable."""
    port.stop_reading()
    broker.pulls.release_all(clock.now_ms())
    port.end_turn()  # appends what was accepted; with sync flush, its answers come with the flush
    await group.close()
    await port.close()
    broker.store.flush()  # before it is noted what has been delivered
    try:
        broker.save()
        broker.transactions.save(at_once=True)
    except StoreError as error:  # derived, or saved a moment ago: the log itself is safe
        log.warning("configuration not saved at the stop: %s", error)
    try:
        broker.store.close()
    except StoreFull as error:
        log.warning("no checkpoint at the stop, the next start reads the log again: %s", error)


def _loops(
    config: Config, clock: Clock, broker: Broker, port: Port, upkeep: Upkeep, failed: asyncio.Event
) -> list[Any]:
    async def tick() -> None:
        while True:
            await asyncio.sleep(tick_interval_s(config))
            broker.tick(clock.now_ms())
            port.turn_soon()

    async def look_after_lines() -> None:
        while True:
            await asyncio.sleep(LINES_S)
            port.look_after_lines()

    async def save(what: str, step: Callable[[], None], interval_ms: int) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                step()
            except StoreError as error:
                log.warning("%s not saved: %s", what, error)

    async def keep_store() -> None:
        await upkeep.run()  # ends only when the store has failed
        failed.set()

    return [
        tick(),
        look_after_lines(),
        save("offsets", broker.save_offsets, config.consume.offsets_interval_ms),
        save("delays", broker.save_delays, config.delay.delay_offsets_interval_ms),
        keep_store(),
    ]


def _say_ready(config: Config, role: str, namesrv_address: str | None) -> None:
    where = namesrv_address or ";".join(config.broker.namesrv_addresses)
    sys.stdout.write(
        f"escrowmq is ready ({role}). Name server: {where}\n"
        f"Try it: point any RocketMQ client at {where}; "
        f"look at the messages with: escrowmq store dump {config.store.root_dir}\n"
    )
    sys.stdout.flush()
