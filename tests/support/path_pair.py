"""Two brokers that get the same bytes: one takes the native path, the other the Python path.

    pair = PathPair()
    pair.receive(0, frame)          # to connection 0 of both, perhaps only a part of a frame
    pair.end_turn()                 # both answer; everything that can be seen is compared

Connections, turns, partial frames and responses are those of a real server, without sockets.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from escrowmq.auth.acl import parse_rules
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.broker import Broker
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.clock import ManualClock
from escrowmq.config import Config, NetworkConfig, StoreConfig, TransactionConfig
from escrowmq.errors import StoreError
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.topic_config import TopicConfig
from escrowmq.native import NativePath, load_native
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.server.remoting_server import RemotingServer
from escrowmq.server.server_connection import ServerConnection
from escrowmq.store.columns import KeyColumns
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk
from tests.support.fake_transport import FakeTransport
from tests.support.stores import HOST, NOW_MS

CONFIG = Config(
    store=StoreConfig(
        segment_bytes=64 << 10,
        queue_file_bytes=2000,
        index_slots=101,
        index_entries=5000,
        message_bytes_max=8192,
    ),
    transaction=TransactionConfig(immunity_ms=6_000, check_interval_ms=30_000, checks_max=3),
)
TOPICS = {"T": 4, "orders": 2}
HOSTS = ("127.0.0.1", "127.0.0.1", "10.0.0.7")
CONNECTIONS = len(HOSTS)


class PathBroker:
    """A broker behind a server with some connections."""

    def __init__(
        self,
        native: NativePath,
        disk: FaultyDisk | None = None,
        *,
        config: Config = CONFIG,
        is_sync: bool = False,
        now_ms: int = NOW_MS,
        rules: str | None = None,
    ) -> None:
        """`rules`: an ACL file. Without it, no request needs an account."""
        self._rules = rules
        self.validator = None if rules is None else AccessValidator(parse_rules(rules))
        self.native, self.config, self._is_sync = native, config, is_sync
        self.disk = disk or FaultyDisk()
        self.clock = ManualClock(now_ms)
        self.store = MessageStore.open(self.disk, config.store, store_host=HOST, native=native)
        self.flush_callbacks: list[Callable[[StoreError | None], None]] = []
        self.broker = Broker(
            self.disk,
            self.store,
            config,
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            when_flushed=self._when_flushed if is_sync else None,
            counters=BrokerCounters(self.clock.elapsed_s),
            elapsed_s=self.clock.elapsed_s,
            native=native,
            access_validator=self.validator,
        )
        for topic, queues in TOPICS.items():
            self.broker.topics.put(
                TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues),
                now_ms=now_ms,
            )
        self.broker.save()
        self.server = RemotingServer(
            self.broker,
            self.clock,
            NetworkConfig(),
            keeps_headers=rules is not None,
            send_response_encoder=SendResponseEncoder(store_host=HOST),
            plain_requests=self.broker.native_requests,
        )
        self.connections: list[ServerConnection] = []
        self.transports: list[FakeTransport] = []
        for port, host in enumerate(HOSTS, 40_000):
            connection = ServerConnection(self.server)
            transport = FakeTransport(port, host=host)
            connection.connection_made(transport)
            self.connections.append(connection)
            self.transports.append(transport)

    def _when_flushed(self, _: int, callback: Callable[[StoreError | None], None]) -> None:
        self.flush_callbacks.append(callback)

    def finish_flush(self, error: StoreError | None) -> None:
        """Let the flush end, and those that follow from its responses."""
        while self.flush_callbacks:
            callbacks, self.flush_callbacks = self.flush_callbacks, []
            for callback in callbacks:
                callback(error)
            self.server.end_turn()  # writes the responses
            self.server.end_turn()  # and whatever they have added to the turn

    def take_responses(self) -> list[list[bytes]]:
        """Return the frames that each connection got since the last call, sorted.

        A turn may send its responses in any order: clients match them by their numbers.
        """
        responses = []
        for transport in self.transports:
            responses.append(sorted(split_frames(b"".join(transport.written))))
            transport.written.clear()
        return responses

    def killed(self) -> PathBroker:
        """Return a broker on what is on the disk, as after `kill -9`."""
        self.store.abandon()
        return PathBroker(
            self.native,
            self.disk,
            config=self.config,
            is_sync=self._is_sync,
            now_ms=self.clock.now_ms(),
            rules=self._rules,
        )

    def replace_rules(self, rules: str) -> None:
        assert self.validator is not None
        self._rules = rules
        self.validator.replace_rules(parse_rules(rules))

    def state(self) -> dict[str, Any]:
        """Return all that can be seen of the broker, except metrics of time."""
        store, counters = self.store, self.broker.counters
        coordinator = self.broker.transactions.coordinator
        queues = sorted(store.queues())
        return {
            "log": [
                bytes(store._log.read_bytes(base, store._log.segment_end(base)))  # the very bytes
                for base in store._log.segment_bases()
            ],
            "log end": store.end,
            "entries": {queue: store.entries(*queue, 0, 1 << 30) for queue in queues},
            "keys": sorted(
                (hash_value, log_offset)
                # Until a checkpoint, the keys of the whole run.
                for keys in [KeyColumns.from_pending(store._index.pending)]
                for hash_value, log_offset in zip(keys.hashes, keys.log_offsets, strict=True)
            ),
            "halves": [
                (
                    *half.group_topic_key,
                    half.queue_offset,
                    half.log_offset,
                    half.size,
                    half.queue_id,
                    half.parked_ms,
                    half.due_ms,
                    half.checks,
                    half.is_stranded,
                    half.is_being_decided,
                    half.reason,
                    half.previous_offsets,
                    None if half.producer is None else half.producer.address,
                )
                for half in coordinator.halves
            ],
            "totals": (
                coordinator.halves.total.count,
                coordinator.halves.total.size,
                dict(coordinator.halves.count_by_topic),
                coordinator.halves.stranded_count,
            ),
            "states": coordinator.states.dump(),
            "cursors": (coordinator.cursors.half_offset, coordinator.cursors.op_offset),
            "next due": coordinator.schedule.next_due_ms(coordinator.halves),
            "transactions": (
                coordinator.counters.parked,
                dict(coordinator.counters.committed),
                dict(coordinator.counters.rolled_back),
                coordinator.counters.finish_seconds.counts,
                coordinator.counters.repeated_ends,
                coordinator.counters.conflicts,
                coordinator.counters.duplicate_sends,
            ),
            "requests": {code: count for code, count in counters.requests.items() if count},
            "refused": dict(counters.refused),
            "messages in": {
                key: (sizes.counts, sizes.sum) for key, sizes in counters.messages_in.items()
            },
            "messages out": {key: tuple(count) for key, count in counters.messages_out.items()},
            "fetched": counters.fetched_messages,
            "offsets": json.loads(self.broker.offsets.encode()),
            "held pulls": self.broker.pull_processor.held_count,
            "damage": dict(store.damage.counts),
            "stored": counters.stored_messages,
            "sends": counters.send_seconds.count,
            "origins": [connection.origin for connection in self.connections],
        }


class PathPair:
    def __init__(
        self, *, config: Config = CONFIG, is_sync: bool = False, rules: str | None = None
    ) -> None:
        native = load_native({})
        assert native.module is not None, native.reason
        self.native = PathBroker(native, config=config, is_sync=is_sync, rules=rules)
        self.python = PathBroker(
            NativePath(None, "a test"), config=config, is_sync=is_sync, rules=rules
        )

    @property
    def both(self) -> tuple[PathBroker, PathBroker]:
        return self.native, self.python

    def receive(self, connection: int, data: bytes) -> None:
        for path in self.both:
            path.connections[connection].data_received(data)

    def end_turn(self, *, advance_ms: int = 0) -> list[list[bytes]]:
        """End the turn of both, compare them, and return the responses of each connection.

        If responses wait for a flush, nothing is compared yet: a refusal need not wait.
        """
        for path in self.both:
            path.server.end_turn()
            path.server.end_turn()  # a request that another one of the turn decides needs a second
        if self.native.flush_callbacks or self.python.flush_callbacks:
            return []
        return self.compare(advance_ms=advance_ms)

    def compare(self, *, advance_ms: int = 0) -> list[list[bytes]]:
        responses = self.native.take_responses()
        assert responses == self.python.take_responses()
        native, python = self.native.state(), self.python.state()
        for name, value in python.items():
            assert native[name] == value, name
        for path in self.both:
            path.clock.advance(ms=advance_ms)
        return responses

    def kill(self) -> None:
        self.native, self.python = self.native.killed(), self.python.killed()
        self.compare()

    def replace_rules(self, rules: str) -> None:
        for path in self.both:
            path.replace_rules(rules)

    def change_config(self, **changes: Any) -> None:
        for path in self.both:
            path.config = replace(path.config, **changes)
            path.broker.change_config(path.config)


def split_frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        (length,) = struct.unpack_from(">I", data)
        frames.append(data[: 4 + length])
        data = data[4 + length :]
    return frames
