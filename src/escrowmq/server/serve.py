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
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvloop

from escrowmq.broker.broker import Broker, BrokerRules
from escrowmq.broker.delays import DelayRules
from escrowmq.broker.pulls import PullRules
from escrowmq.broker.sends import SendRules
from escrowmq.broker.topics import WRITE, TopicRules
from escrowmq.clock import Clock, SystemClock
from escrowmq.config import Config, FlushMode
from escrowmq.errors import EscrowError, StoreError
from escrowmq.message.ids import UniqueKeys, encode_host
from escrowmq.namesrv.namesrv import NameServer
from escrowmq.namesrv.registration import BrokerCard
from escrowmq.server.groupcommit import GroupCommit
from escrowmq.server.registrar import Registrar
from escrowmq.server.tcp import Port, PortLimits, TcpLine, bind, port_of
from escrowmq.server.upkeep import Upkeep, UpkeepSettings
from escrowmq.store.disk import RealDisk
from escrowmq.store.settings import StoreSettings
from escrowmq.store.store import MessageStore
from escrowmq.wire.bodies import DataVersion, TopicConfig
from escrowmq.wire.fastpath import Request

log = logging.getLogger(__name__)

TICK_S = 0.1
LINES_S = 1.0
OWN_FILES = 1024  # of the store and the name server, beside those of connections
SWITCH_S = 0.0005  # a checkpoint's thread must not hold a turn up for Python's usual 5 ms


def run(config: Config, role: str) -> int:
    """Serve until a signal says stop. 0: stopped in order; 2: could not start; 1: failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    _allow_files(config.network.connections_max)
    try:
        return uvloop.run(_serve(config, role))
    except (EscrowError, OSError) as error:
        sys.stderr.write(f"escrowmq: {error}\n")
        return 2


def _allow_files(connections_max: int) -> None:
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


async def _serve(config: Config, role: str) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    clock = SystemClock()
    async with contextlib.AsyncExitStack() as parts:
        namesrv_address = None
        if role in ("all", "namesrv"):
            namesrv_address = await parts.enter_async_context(_name_server(config, clock))
        failed = asyncio.Event()
        if role in ("all", "broker"):
            own = [namesrv_address] if namesrv_address is not None else []
            await parts.enter_async_context(_broker(config, clock, own, failed))
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
    log.info("stopped")
    return 1 if failed.is_set() else 0


class _NameServerPort:
    """The name server as a port sees it."""

    def __init__(self, names: NameServer) -> None:
        self._names = names

    def handle(self, line: TcpLine, request: Request[Any], now_ms: int) -> None:
        line.write(self._names.handle(request, line, now_ms=now_ms))

    def end_turn(self, now_ms: int) -> None:
        pass

    def line_closed(self, line: TcpLine) -> None:
        self._names.line_closed(line)


@contextlib.asynccontextmanager
async def _name_server(config: Config, clock: Clock) -> AsyncIterator[str]:
    names = NameServer()
    port = Port(_NameServerPort(names), clock, port_limits(config))
    host = config.network.bind_address
    bound = bind(host, config.namesrv.namesrv_port)
    number = port_of(bound)
    await port.listen(bound)
    log.info("name server listens address=%s:%d", host, number)

    async def expire() -> None:
        while True:
            await asyncio.sleep(config.namesrv.broker_scan_interval_ms / 1000)
            port.look_after_lines()
            for line in names.tick(now_ms=clock.now_ms()):
                line.close()  # type: ignore[attr-defined]  # it is a TcpLine: we handed it in

    async with _running(expire()):
        yield f"{_reachable(host)}:{number}"
    await port.close()


@contextlib.asynccontextmanager
async def _broker(
    config: Config, clock: Clock, namesrv_addresses: list[str], failed: asyncio.Event
) -> AsyncIterator[None]:
    disk = RealDisk(config.store.root_dir)
    address = config.broker.advertised_address or _reachable(config.network.bind_address)
    # The port first: it is in the id of every message.
    bound = bind(config.network.bind_address, config.network.listen_port)
    number = port_of(bound)
    host = encode_host(address, number)
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
    sync = config.store.flush_mode is FlushMode.SYNC
    group = GroupCommit(store, wait_s=config.store.sync_flush_timeout_ms / 1000)
    registrars: list[Registrar] = []

    def tell_name_servers() -> None:
        for registrar in registrars:
            registrar.changed()

    broker = Broker(
        disk,
        store,
        broker_rules(config, host),
        UniqueKeys(address=address, process_id=os.getpid(), salt=secrets.randbits(32)),
        when_flushed=group.when_flushed if sync else None,
        topics_changed=tell_name_servers,
    )
    port = Port(broker, clock, port_limits(config))
    await port.listen(bound)
    log.info("broker listens address=%s:%d", config.network.bind_address, number)
    registrars += _registrars(config, broker, f"{address}:{number}", namesrv_addresses)
    loops = _loops(config, clock, broker, port, Upkeep(store, disk, clock, _upkeep(config)), failed)
    async with _running(*(registrar.run() for registrar in registrars), *loops):
        for registrar in registrars[: len(namesrv_addresses)]:
            await registrar.registered.wait()
        yield
    await _stop(broker, port, group, clock)


async def _stop(broker: Broker, port: Port, group: GroupCommit, clock: Clock) -> None:
    """Answer what is under way, then make everything durable."""
    port.stop_reading()
    broker.pulls.release_all(clock.now_ms())
    port.end_turn()  # appends what was accepted; with sync flush, its answers come with the flush
    await group.close()
    await port.close()
    broker.store.flush()  # before it is noted what has been delivered
    broker.save()
    broker.store.close()


def _registrars(
    config: Config, broker: Broker, address: str, namesrv_addresses: list[str]
) -> list[Registrar]:
    host, _, port = address.rpartition(":")
    card = BrokerCard(
        cluster=config.broker.cluster_name,
        name=config.broker.broker_name,
        address=address,
        ha_address=f"{host}:{int(port) + 1}",
    )
    return [
        Registrar(
            where,
            card,
            lambda: _topics_of(broker),
            interval_s=config.broker.register_interval_ms / 1000,
        )
        for where in dict.fromkeys([*namesrv_addresses, *config.broker.namesrv_addresses])
    ]


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


@contextlib.asynccontextmanager
async def _running(*loops: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(_stop_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_if_failed(task: asyncio.Task[None]) -> None:
    """A broker without one of its loops would only look alive: better none at all."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a loop failed, stopping", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


def port_limits(config: Config) -> PortLimits:
    return PortLimits(
        lines_max=config.network.connections_max,
        idle_max_s=config.network.idle_max_s,
        unsent_bytes_max=config.network.in_flight_bytes_max,
        line_unsent_bytes_max=min(1 << 20, config.network.connection_in_flight_bytes_max),
    )


def tick_interval_s(config: Config) -> float:
    """A delayed message is late by no more than this, and what the machine adds."""
    return min(TICK_S, config.delay.timer_precision_ms / 1000)


def store_settings(config: Config) -> StoreSettings:
    kept = config.store
    return StoreSettings(
        segment_bytes=kept.segment_bytes,
        queue_file_bytes=kept.queue_file_bytes,
        index_enabled=kept.index_enabled,
        index_slots=kept.index_slots,
        index_entries=kept.index_entries,
        message_bytes_max=kept.message_bytes_max,
        sealed=kept.sealed,
        reserved_hours=kept.reserved_hours,
        delete_hours=kept.delete_hours,
        expire_ratio=kept.expire_percent / 100,
        force_expire_ratio=kept.force_expire_percent / 100,
        refuse_ratio=kept.refuse_percent / 100,
    )


def broker_rules(config: Config, host: bytes) -> BrokerRules:
    about = config.broker
    return BrokerRules(
        topics=TopicRules(
            cluster=about.cluster_name,
            broker_name=about.broker_name,
            auto_create=about.creates_topics,
            template_queues=about.topic_queues,
            has_cluster_topic=about.has_cluster_topic,
            has_broker_topic=about.has_broker_topic,
        ),
        sends=SendRules(
            cluster=about.cluster_name,
            store_host=host,
            region=about.region_id,
            trace_on=about.trace_on,
            message_bytes_max=config.store.message_bytes_max,
            writable=bool(about.broker_permission & WRITE),
        ),
        pulls=PullRules(
            perm=about.broker_permission,
            long_polling=config.consume.long_polling,
            short_hold_ms=config.consume.short_poll_ms,
            count_max=config.consume.pull_messages_max,
            bytes_max=config.consume.pull_bytes_max,
            waiting_max=config.consume.waiting_pulls_max,
        ),
        delays=DelayRules(
            levels_ms=config.delay.delay_levels_ms,
            timer_max_ms=config.delay.timer_delay_max_s * 1000,
            has_timers=config.delay.timer_enabled,
        ),
        auto_create_groups=about.creates_groups,
        stores_replies=about.stores_replies,
    )


def _upkeep(config: Config) -> UpkeepSettings:
    return UpkeepSettings(
        flush_interval_s=config.store.flush_interval_ms / 1000,
        checkpoint_interval_s=config.store.checkpoint_interval_ms / 1000,
        expire_interval_s=config.store.expire_interval_ms / 1000,
    )


def _topics_of(broker: Broker) -> tuple[list[TopicConfig], DataVersion]:
    version = broker.topics.version
    topics = [
        TopicConfig(
            topic_name=topic.topic_name,
            read_queue_nums=topic.read_queue_nums,
            write_queue_nums=topic.write_queue_nums,
            perm=topic.perm,
            topic_filter_type=topic.topic_filter_type,
            topic_sys_flag=topic.topic_sys_flag,
            order=topic.order,
        )
        for topic in broker.topics.all().values()
    ]
    return topics, DataVersion(
        state_version=version.state_version, timestamp=version.timestamp, counter=version.counter
    )


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _say_ready(config: Config, role: str, namesrv_address: str | None) -> None:
    where = namesrv_address or ";".join(config.broker.namesrv_addresses)
    sys.stdout.write(
        f"escrowmq is ready ({role}). Name server: {where}\n"
        f"Try it: point any RocketMQ client at {where}; "
        f"look at the messages with: escrowmq store dump {config.store.root_dir}\n"
    )
    sys.stdout.flush()
