"""The name server on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from escrowmq.clock import Clock, SteadyClock
from escrowmq.errors import RequestRefused
from escrowmq.metrics import Registry
from escrowmq.namesrv.namesrv import NameServer
from escrowmq.server.access import Access
from escrowmq.server.keptsettings import KeptSettings
from escrowmq.server.line import TcpLine
from escrowmq.server.live import LiveSettings
from escrowmq.server.loops import running
from escrowmq.server.metrics import port_metrics
from escrowmq.server.rules import port_limits, port_security
from escrowmq.server.tcp import Port, bind, port_of, reachable
from escrowmq.store.disk import RealDisk
from escrowmq.wire.answers import refuse
from escrowmq.wire.fastpath import Request

log = logging.getLogger(__name__)


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
