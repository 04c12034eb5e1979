"""A test bench for a broker without sockets: its store on a disk in memory, and one channel.

    bench = BrokerBench()
    [response] = bench.turn(send_request(body=b"1"))
    assert bodies(bench.store, "T") == [b"1"]

`tests/support/escrows.py` has one with a clock and restarts, for tests of transactions.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Self

from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.broker import Broker
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.client_memory import ClientMemory
from escrowmq.config import Config
from escrowmq.errors import StoreError
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.testing.disks import FaultyDisk, MemoryDisk
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel
from tests.support.sliced import finish
from tests.support.stores import HOST, NOW_MS, TINY, open_store


class BrokerBench:
    """A broker and a channel to it. With `sync`, responses wait until a test calls a callback."""

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        *,
        config: Config | None = None,
        sync: bool = False,
        counters: BrokerCounters | None = None,
        memory: ClientMemory | None = None,
        elapsed_s: Callable[[], float] = lambda: 0.0,
        access_validator: AccessValidator | None = None,
    ) -> None:
        self.disk = disk or FaultyDisk()
        self.config = config or Config(store=TINY)
        self.store = open_store(self.disk, self.config.store)
        self.flush_callbacks: list[Callable[[StoreError | None], None]] = []
        self.broker = Broker(
            self.disk,
            self.store,
            self.config,
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            when_flushed=self._when_flushed if sync else None,
            counters=counters,
            memory=memory,
            elapsed_s=elapsed_s,
            access_validator=access_validator,
        )
        self.channel = FakeChannel()

    def turn(
        self, *requests: Any, at_ms: int = NOW_MS, channel: FakeChannel | None = None
    ) -> list[Response]:
        """Handle requests, end the turn, and return the responses on the channel."""
        channel = channel or self.channel
        for request in requests:
            finish(self.broker.handle(channel, request, at_ms))
        self.broker.end_turn(at_ms)
        return channel.responses()

    def tick(self, at_ms: int) -> None:
        """Run the broker's periodic work, and end the turn."""
        self.broker.tick(at_ms)
        self.broker.end_turn(at_ms)

    def after_power_cut(self) -> Self:
        """Return a bench with only what was flushed."""
        assert isinstance(self.disk, FaultyDisk)
        return type(self)(self.disk.power_cut(Random(0), "none"))

    def _when_flushed(self, _: int, callback: Callable[[StoreError | None], None]) -> None:
        self.flush_callbacks.append(callback)
