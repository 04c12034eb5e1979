"""The name server on a port of its own.

Keys and values of a name server, in a file: `namesrv/kvConfig.json` under the data directory.

Each change is durable before it is answered; if the disk refuses, that is logged, and tried again.

Keep name servers informed: one task per name server, which never gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from escrowmq.broker.broker import Broker
from escrowmq.clock import Clock, SteadyClock
from escrowmq.config import Config, TlsMode
from escrowmq.errors import (
    BrokenBody,
    ConfigError,
    EscrowError,
    OutcomeUnknown,
    RequestRefused,
    StoreError,
)
from escrowmq.metrics import Registry
from escrowmq.namesrv.name_server import NameServer, Settings
from escrowmq.namesrv.registration import Ask, BrokerCard, read_registered, register, unregister
from escrowmq.parsing import lenient_json
from escrowmq.remoting.bodies import DataVersion, TopicConfig
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Answer, Connection, Sign
from escrowmq.remoting.requests import Body, Request
from escrowmq.remoting.responses import refuse
from escrowmq.server.live_config import LiveSettings
from escrowmq.server.metrics import port_metrics
from escrowmq.server.remoting_server import Port, TcpLine, bind, port_of, reachable
from escrowmq.server.rules import port_limits, port_security
from escrowmq.server.security import Access, context_to_others, context_to_own, outgoing_signer
from escrowmq.server.tasks import running
from escrowmq.store.disk import Disk, RealDisk, read_file, replace_file

log = logging.getLogger(__name__)

PATH: Final = "namesrv/kvConfig.json"


class KeptSettings:
    def __init__(self, disk: Disk) -> None:
        """Raises ConfigError if the file is there and cannot be read."""
        self._disk = disk
        data = read_file(disk, PATH)
        try:
            content = lenient_json(data) if data else {}
        except BrokenBody as error:
            raise ConfigError(f"{PATH}: {error}") from error
        self.settings = Settings.load(content)
        self._saved = self.settings.revision

    def save(self) -> None:
        """If there is anything new."""
        if self.settings.revision == self._saved:
            return
        try:
            replace_file(self._disk, PATH, msgspec.json.encode(self.settings.dump()))
        except StoreError as error:
            log.warning("key-value settings not saved: %s", error)
        else:
            self._saved = self.settings.revision


class _NameServerPort:
    """The name server as a port sees it."""

    def __init__(self, names: NameServer, access: Access, kept: KeptSettings) -> None:
        self._names = names
        self._access = access
        self._kept = kept

    def handle(self, line: TcpLine, request: Request[Any], now_ms: int) -> None:
        guard = self._access.guard
        if guard is not None:
            try:
                guard.check(request, line.peer, self._access.needs_at_name_server)
            except RequestRefused as error:
                line.write(refuse(request, error))
                return
        line.write(self._names.handle(request, line, now_ms=now_ms))

    def end_turn(self, now_ms: int) -> bool:
        self._kept.save()
        return False

    def line_closed(self, line: TcpLine) -> None:
        self._names.line_closed(line)


@contextlib.asynccontextmanager
async def name_server(
    clock: Clock, access: Access, registry: Registry, live: LiveSettings
) -> AsyncIterator[str]:
    config = live.config
    kept = KeptSettings(RealDisk(config.store.root_dir))
    host = config.network.bind_address
    bound = bind(host, config.namesrv.namesrv_port)
    number = port_of(bound)
    names = NameServer(
        settings=kept.settings, config={"listenPort": f"{number}", "bindAddress": host}
    )
    clock = SteadyClock(clock)  # a jump must not make every broker look gone
    service = _NameServerPort(names, access, kept)
    port = Port(service, clock, port_limits(config), port_security(config, access))
    await port.listen(bound)
    registry.add(port_metrics(port, "namesrv"))
    live.add(lambda now: port.change_limits(port_limits(now)))
    log.info("name server listens address=%s:%d", host, number)

    async def expire() -> None:
        while True:
            await asyncio.sleep(config.namesrv.broker_scan_interval_ms / 1000)
            port.look_after_lines()
            for line in names.tick(now_ms=clock.now_ms()):
                line.close()  # type: ignore[attr-defined]  # it is a TcpLine: we handed it in

    async with running(expire()):
        yield f"{reachable(host)}:{number}"
    await port.close()


ANSWER_WAIT_S = 5.0
RETRY_S = 1.0


class Registrar:
    """`topics` gives the topics and their version as they are now."""

    def __init__(
        self,
        address: str,
        card: BrokerCard,
        topics: Callable[[], tuple[list[TopicConfig], DataVersion]],
        *,
        interval_s: float,
        sign: Sign | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sign = sign
        self._tls = tls
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._card = card
        self._topics = topics
        self._interval_s = interval_s
        self._changed = asyncio.Event()
        self.registered = asyncio.Event()  # once, at least

    def changed(self) -> None:
        """A topic came or went: say so now, not at the next round."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            try:
                async with _Call(self._host, self._port, self._sign, self._tls) as call:
                    await self._keep_registered(call)
            except (OSError, EscrowError, TimeoutError) as error:
                log.warning(
                    "name server not reached address=%s:%d: %s", self._host, self._port, error
                )
                await asyncio.sleep(RETRY_S)

    async def _keep_registered(self, call: _Call) -> None:
        try:
            while True:
                self._changed.clear()
                topics, version = self._topics()
                read_registered(*await call.ask(register(self._card, topics, version)))
                if not self.registered.is_set():
                    log.info("registered name_server=%s:%d", self._host, self._port)
                    self.registered.set()
                # Not wait_for: in Python 3.11 it loses a cancellation that comes with the result.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._changed.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(OSError, EscrowError, TimeoutError):
                await call.ask(unregister(self._card))
            raise


class _Call:
    """One line to a name server: ask, wait, read the answer."""

    def __init__(self, host: str, port: int, sign: Sign | None, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._connection = Connection(sign=sign)

    async def __aenter__(self) -> _Call:
        async with asyncio.timeout(ANSWER_WAIT_S):
            self._reader, self._writer = await asyncio.open_connection(
                self._host.strip("[]"), self._port, ssl=self._tls
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, ask: Ask) -> tuple[Command, Body]:
        call, data = self._connection.call(ask.code, ask.fields, ask.body, deadline_s=0)
        self._writer.write(data)
        async with asyncio.timeout(ANSWER_WAIT_S):
            while chunk := await self._reader.read(64 * 1024):
                self._connection.receive(chunk)
                for event in self._connection.events():
                    if isinstance(event, Answer) and event.call is call:
                        return event.command, bytes(event.body)
        raise OutcomeUnknown("the name server closed the line")


def registrars_of(
    config: Config,
    broker: Broker,
    address: str,
    namesrv_addresses: list[str],
    own_sign: Sign | None,
) -> list[Registrar]:
    """`namesrv_addresses` are of this process, which has `own_sign` for them."""
    host, _, port = address.rpartition(":")
    card = BrokerCard(
        cluster=config.broker.cluster_name,
        name=config.broker.broker_name,
        address=address,
        ha_address=f"{host}:{int(port) + 1}",
    )
    security = config.security
    own_tls = other_tls = None
    if security.tls_mode is TlsMode.ENFORCING:
        own_tls = context_to_own(security)
    if security.tls_outgoing:
        other_tls = context_to_others(security)
    return [
        Registrar(
            where,
            card,
            lambda: _topics_of(broker),
            interval_s=config.broker.register_interval_ms / 1000,
            sign=own_sign if where in namesrv_addresses else outgoing_signer(config),
            tls=own_tls if where in namesrv_addresses else other_tls,
        )
        for where in dict.fromkeys([*namesrv_addresses, *config.broker.namesrv_addresses])
    ]


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
