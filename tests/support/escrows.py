"""A test bench for transactions: a broker on a disk in memory, and requests for it.

    bench = EscrowBench()
    half = bench.park("k1")
    assert bench.end(half, COMMIT).code == 0
    assert bench.bodies() == [b"k1"]

The test moves the clock and flushes the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from escrowmq.broker.broker import Broker
from escrowmq.config import BrokerConfig, Config, StoreConfig, TransactionConfig
from escrowmq.errors import StoreError
from escrowmq.escrow.coordinator import DECISION_PIECE_BYTES
from escrowmq.escrow.decisions import Decision
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import DecidedBy
from escrowmq.message.keys import UniqueKeyGenerator, decode_offset_id
from escrowmq.message.names import HALF_TOPIC, OP_TOPIC
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import LogOffset, StoredRecord, decode_record
from escrowmq.message.topic_config import TopicConfig
from escrowmq.message.transaction import Verdict
from escrowmq.remoting.bodies import (
    BatchWinners,
    HalfPositions,
    Heartbeat,
    ProducerEntry,
    WinningAttempt,
    WriterState,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import FLAG_ONEWAY, RequestCode
from escrowmq.remoting.headers import (
    CheckTransactionState,
    DecideBatch,
    EndTransaction,
    EndTransactions,
    Header,
    RegisterWriter,
    UnregisterClient,
    WriterHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk, Survival
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, new_request, send_request
from tests.support.stores import HOST, NOW_MS

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
CURSOR_GROUP = "CID_RMQ_SYS_TRANS"
QUEUES = 2

SETTINGS = StoreConfig(
    segment_bytes=1 << 20,
    queue_file_bytes=2000,
    index_slots=101,
    index_entries=2000,
    message_bytes_max=1 << 19,
)
# Segments that a few records fill, for tests that delete segments.
SMALL_SEGMENTS = StoreConfig(
    segment_bytes=4096, queue_file_bytes=200, index_slots=7, index_entries=99
)
ESCROW = TransactionConfig(immunity_ms=6_000, check_interval_ms=30_000, checks_max=3)


class HalfPosition(NamedTuple):
    """The position of a half, from the response to its send."""

    queue_offset: int
    log_offset: int


class EscrowBench:
    """A broker and a channel to it. With `sync`, responses wait for `flush()`, the group commit."""

    def __init__(
        self,
        disk: FaultyDisk | None = None,
        *,
        settings: StoreConfig = SETTINGS,
        config: TransactionConfig = ESCROW,
        piece_bytes: int = DECISION_PIECE_BYTES,
        now_ms: int = NOW_MS,
        sync: bool = False,
    ) -> None:
        self.disk = FaultyDisk() if disk is None else disk
        self.settings, self.config, self.sync = settings, config, sync
        self.piece_bytes = piece_bytes
        self.now_ms = now_ms
        self.store = MessageStore.open(self.disk, settings, store_host=HOST)
        # The end of the log that a callback waits for, and the callback.
        self._waiting: list[tuple[int, Callable[[StoreError | None], None]]] = []
        self.broker = Broker(
            self.disk,
            self.store,
            Config(
                broker=BrokerConfig(cluster_name="C"),
                store=replace(settings, message_bytes_max=1 << 19),
                transaction=config,
            ),
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            when_flushed=self._when_flushed if sync else None,
            decision_piece_bytes=piece_bytes,
        )
        self.coordinator = self.broker.transactions.coordinator
        self.checker = self.broker.transactions.checker
        self.channel = FakeChannel("sender")
        if self.broker.topics.find("T") is None:
            topic = TopicConfig(topic_name="T", read_queue_nums=QUEUES, write_queue_nums=QUEUES)
            self.broker.topics.put(topic, now_ms=now_ms)
            self.turn()

    # --- time and durability ---------------------------------------------------------------------

    def _when_flushed(self, end: int, callback: Callable[[StoreError | None], None]) -> None:
        if end <= self.store.flushed_offset:
            callback(None)
        else:
            self._waiting.append((end, callback))

    def flush(self, error: StoreError | None = None) -> None:
        self.finish(self.store.begin_flush(), error)

    def finish(self, flush: LogFlush, error: StoreError | None = None) -> None:
        flush.run()
        flushed = self.store.finish_flush(flush)
        waiting, self._waiting = self._waiting, []
        for end, callback in waiting:
            if end <= flushed:
                callback(error)
            else:
                self._waiting.append((end, callback))
        self.turn()  # callbacks may have added records

    def turn(self, *requests: Request[Any], channel: FakeChannel | None = None) -> None:
        """Let the broker handle requests and end its turn, which appends their records."""
        for request in requests:
            self.broker.handle(channel or self.channel, request, self.now_ms)
        self.broker.end_turn(self.now_ms)

    def tick(self, after_ms: int = 0) -> None:
        """Move the clock and run the broker's periodic work."""
        self.now_ms += after_ms
        self.broker.tick(self.now_ms)
        self.turn()

    # --- starts and stops ------------------------------------------------------------------------

    def reopen(self, disk: FaultyDisk) -> EscrowBench:
        return EscrowBench(
            disk,
            settings=self.settings,
            config=self.config,
            piece_bytes=self.piece_bytes,
            now_ms=self.now_ms,
            sync=self.sync,
        )

    def restarted(self) -> EscrowBench:
        """Stop and start as `escrowmq serve` does."""
        self.flush()
        self.broker.save()
        self.broker.transactions.save(force=True)
        self.store.close()
        return self.reopen(self.disk)

    def killed(self, *, with_snapshot: bool = True) -> EscrowBench:
        """Kill the process and start again. Everything that was written survives."""
        self.store.abandon()
        if not with_snapshot and self.disk.exists("escrowmq.escrow"):
            self.disk.remove("escrowmq.escrow")
        return self.reopen(self.disk)

    def save_snapshot(self) -> None:
        """Save the coordinator's snapshot of everything so far."""
        self.store.flush()
        self.broker.transactions.save(force=True)

    def power_cut(self, survival: Survival = "none", seed: int = 0) -> EscrowBench:
        disk = self.disk.power_cut(Random(seed), survival)
        self.store.abandon()
        return self.reopen(disk)

    def truncated(self, log_offset: int) -> EscrowBench:
        """Cut the power during a write and start again with a log that ends at `log_offset`."""
        disk, end = self.disk.power_cut(Random(0), "all"), self.store.end
        for base, _ in self.store.log_files():
            begin = max(base, log_offset)
            if begin < min(end, base + self.settings.segment_bytes):
                file = disk.open(f"commitlog/{base:020d}")
                size = min(end - begin, base + self.settings.segment_bytes - begin)
                file.write_at(begin - base, bytes(size))
                file.close()
        return self.reopen(disk)

    def remove_log_file(self) -> bool:
        """Delete the oldest segment as the server does.

        Return False if it is needed or the only one.
        """
        end = self.store.begin + self.settings.segment_bytes
        self.store.checkpoint()
        if end >= self.store.end:
            return False
        needed_offset = self.broker.oldest_needed_offset()
        if needed_offset is not None and needed_offset < end:
            self.broker.move_messages_below(LogOffset(end), self.now_ms)
            self.turn()
            self.store.checkpoint()
            needed_offset = self.broker.oldest_needed_offset()
        if needed_offset is not None and needed_offset < end:
            return False
        self.store.remove_oldest_file()
        self.store.checkpoint()
        return True

    # --- requests --------------------------------------------------------------------------------

    def park(self, key: str, **changes: Any) -> HalfPosition:
        """Send a half. `changes` are those of `half_request`, and `channel`."""
        channel = changes.pop("channel", None) or self.channel
        self.turn(half_request(key, **changes), channel=channel)
        if self.sync:
            self.flush()
        return position_of(channel.response())

    def end(self, position: tuple[int, int], verdict: int, **changes: Any) -> Response:
        """Send an end. `changes` are those of `end_request`, and `channel`."""
        channel = changes.pop("channel", None) or self.channel
        self.turn(end_request(position, verdict, **changes), channel=channel)
        if self.sync:
            self.flush()
        return channel.response()

    def request(self, request: Request[Any], channel: FakeChannel | None = None) -> Response:
        """Send a request and return the response."""
        self.turn(request, channel=channel)
        if self.sync:
            self.flush()
        return (channel or self.channel).response()

    def register(self, writer: str = "w") -> WriterState:
        return writer_state(self.request(register_writer_request(writer)))

    def heartbeat(self, channel: FakeChannel, *groups: str) -> None:
        self.turn(heartbeat_request(channel, *groups), channel=channel)
        channel.responses()

    def disconnect(self, channel: FakeChannel) -> None:
        channel.is_open = False
        self.broker.channel_closed(channel)

    # --- what tests observe ----------------------------------------------------------------------

    def messages(self, topic: str = "T", queue_id: int = 0) -> list[StoredRecord]:
        """Return the messages of a queue as a consumer reads them."""
        records: list[StoredRecord] = []
        queue_offset = self.store.min_offset(topic, queue_id)
        while True:
            read = self.store.read(topic, queue_id, queue_offset)
            if not read.count:
                return records
            data, index = b"".join(bytes(piece) for piece in read.slices), 0
            while index < len(data):
                log_offset = int.from_bytes(data[index + 28 : index + 36], "big")
                record = decode_record(data, index, LogOffset(log_offset))
                records.append(record)
                index += record.size
            queue_offset = read.next_offset

    def bodies(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        return [bytes(record.body) for record in self.messages(topic, queue_id)]

    def state(self, position: tuple[int, int]) -> str:
        """Return the transaction state that the broker sends in response to UNKNOWN."""
        response = self.end(position, UNKNOWN)
        assert response.code == 0, response.remark
        return response.ext_fields["state"]

    def state_in_memory(self, position: tuple[int, int]) -> str:
        """Return the state without a request."""
        half = self.coordinator.find_open(*position)
        if half is not None:
            return "stranded" if half.is_stranded else "open"
        state = self.coordinator.states.get(position[0])
        return "none" if state is None else state.text

    def cursors(self) -> tuple[int, int]:
        """Return the half and op cursors as RocketMQ would read them."""
        half = self.broker.offsets.query(HALF_TOPIC, CURSOR_GROUP, 0)
        op = self.broker.offsets.query(OP_TOPIC, CURSOR_GROUP, 0)
        return half or 0, op or 0


# --- requests and responses ----------------------------------------------------------------------


def half_request(key: str, **changes: Any) -> Request[Any]:
    """Return the send of a transactional producer.

    `changes` are `body`, `group` and fields of the send; all others become properties.
    """
    fields = {
        name: changes.pop(name)
        for name in ("topic", "queue_id", "flag", "sys_flag", "born_timestamp", "one_way")
        if name in changes
    }
    body = changes.pop("body", key.encode())
    group = changes.pop("group", "p")
    properties = {"TRAN_MSG": "true", "PGROUP": group, "UNIQ_KEY": key, **changes}
    text = encode_properties({k: v for k, v in properties.items() if v}).decode()
    fields = {"sys_flag": 4, "topic": "T", **fields}
    return send_request(body=body, producer_group=group, properties=text, **fields)


def end_request(position: tuple[int, int], verdict: int, **changes: Any) -> Request[Any]:
    one_way = changes.pop("one_way", False)
    fields = EndTransaction(
        producer_group=changes.pop("group", "p"),
        tran_state_table_offset=position[0],
        commit_log_offset=position[1],
        commit_or_rollback=verdict,
        from_transaction_check=changes.pop("check", False),
    )
    return new_request(RequestCode.END_TRANSACTION, fields, flag=FLAG_ONEWAY if one_way else 0)


def end_many_request(
    positions: list[tuple[int, int]], verdict: int, *, group: str = "p"
) -> Request[Any]:
    fields = EndTransactions(producer_group=group, commit_or_rollback=verdict)
    return new_request(
        RequestCode.END_TRANSACTIONS, fields, encode_body(HalfPositions(halves=positions))
    )


def register_writer_request(writer: str = "w") -> Request[Any]:
    return new_request(RequestCode.REGISTER_WRITER, RegisterWriter(writer=writer))


def query_writer_request(writer: str = "w") -> Request[Any]:
    return new_request(RequestCode.QUERY_WRITER, WriterHeader(writer=writer))


def decide_batch_request(
    batch: int,
    fence: int,
    winners: list[tuple[str, int]],
    *,
    writer: str = "w",
    last: bool = False,
) -> Request[Any]:
    fields = DecideBatch(writer=writer, batch=batch, fence=fence, last=last)
    attempts = [WinningAttempt(attempt=attempt, count=count) for attempt, count in winners]
    return new_request(
        RequestCode.DECIDE_BATCH, fields, encode_body(BatchWinners(winners=attempts))
    )


def heartbeat_request(channel: FakeChannel, *groups: str) -> Request[Any]:
    producers = [ProducerEntry(group_name=group) for group in groups]
    heartbeat = Heartbeat(client_id=f"client of {channel.address}", producer_data_set=producers)
    return new_request(RequestCode.HEART_BEAT, Header(), encode_body(heartbeat))


def unregister_request(channel: FakeChannel, group: str) -> Request[Any]:
    fields = UnregisterClient(client_id=f"client of {channel.address}", producer_group=group)
    return new_request(RequestCode.UNREGISTER_CLIENT, fields)


def position_of(response: Response) -> HalfPosition:
    """Return the position of a half from the response to its send."""
    assert response.code == 0, response.remark
    _, log_offset = decode_offset_id(response.ext_fields["msgId"])
    return HalfPosition(int(response.ext_fields["queueOffset"]), log_offset)


def fill_segments(bench: EscrowBench) -> None:
    """Fill several small segments with transactions that are rolled back."""
    for number in range(40):
        bench.end(bench.park(f"other {number}", body=b"x" * 200), ROLLBACK)


def append_final_without_op(bench: EscrowBench, half: Half) -> None:
    """Append the final of a commit without its op, as a crash between the two leaves the log."""
    decision = bench.coordinator.decide(
        half.queue_offset,
        half.log_offset,
        Verdict.COMMIT,
        group=half.group,
        by=DecidedBy.PRODUCER,
        now_ms=NOW_MS,
    )
    assert isinstance(decision, Decision)
    final, _ = decision.records
    bench.store.append([final], now_ms=NOW_MS)


def writer_state(response: Response) -> WriterState:
    assert response.code == 0, response.remark
    return decode_body(WriterState, response.body)


def sent_checks(channel: FakeChannel) -> list[tuple[str, HalfPosition]]:
    """Return the key and the position of each check sent to a channel since the last call."""
    checks = []
    for code, fields, _ in channel.oneway_requests:
        if code == RequestCode.CHECK_TRANSACTION_STATE:
            assert isinstance(fields, CheckTransactionState)
            position = HalfPosition(fields.tran_state_table_offset, fields.commit_log_offset)
            checks.append((fields.transaction_id or "", position))
    channel.oneway_requests.clear()
    return checks
