"""A broker with its escrow on a disk in memory; lines, clock and flushes are moved by hand.

bench = EscrowBench()
half = bench.park("k1")
assert bench.end(half, COMMIT).code == 0
assert bench.bodies() == [b"k1"]
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
from tests.interop.remoting import Answer
from tests.support.broker_requests import FakeLine, a_send, ask
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
ESCROW = TransactionConfig(immunity_ms=6_000, check_interval_ms=30_000, checks_max=3)


class Place(NamedTuple):
    """Of a half, as the answer to its send says it."""

    queue_offset: int
    log_offset: int


class EscrowBench:
    """`sync`: nobody is answered before `flush`, which is the group commit."""

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
        self.escrow = self.broker.transactions.coordinator
        self.checks = self.broker.transactions.checker
        self.line = FakeLine("sender")
        if self.broker.topics.find("T") is None:
            topic = TopicConfig(topic_name="T", read_queue_nums=QUEUES, write_queue_nums=QUEUES)
            self.broker.topics.put(topic, now_ms=now_ms)
            self.turn()

    # --- time and durability ---------------------------------------------------------------------

    def _when_flushed(self, end: int, tell: Callable[[StoreError | None], None]) -> None:
        if end <= self.store.flushed_offset:
            tell(None)
        else:
            self._waiting.append((end, tell))

    def flush(self, error: StoreError | None = None) -> None:
        self.finish(self.store.begin_flush(), error)

    def finish(self, flush: LogFlush, error: StoreError | None = None) -> None:
        flush.run()
        flushed = self.store.finish_flush(flush)
        told = [tell for end, tell in self._waiting if end <= flushed]
        self._waiting = [(end, tell) for end, tell in self._waiting if end > flushed]
        for tell in told:
            tell(error)
        self.turn()  # what an answer made necessary

    def turn(self, *requests: Request[Any], line: FakeLine | None = None) -> None:
        for request in requests:
            self.broker.handle(line or self.line, request, self.now_ms)
        self.broker.end_turn(self.now_ms)

    def tick(self, after_ms: int = 0) -> None:
        self.now_ms += after_ms
        self.broker.tick(self.now_ms)
        self.turn()

    # --- starts and stops ------------------------------------------------------------------------

    def again(self, disk: FaultyDisk) -> EscrowBench:
        return EscrowBench(
            disk,
            settings=self.settings,
            config=self.config,
            piece_bytes=self.piece_bytes,
            now_ms=self.now_ms,
            sync=self.sync,
        )

    def stopped(self) -> EscrowBench:
        """As `escrowmq serve` stops and starts."""
        self.flush()
        self.broker.save()
        self.broker.transactions.save(force=True)
        self.store.close()
        return self.again(self.disk)

    def killed(self, *, with_note: bool = True) -> EscrowBench:
        """The process is gone: what was written stays."""
        self.store.abandon()
        if not with_note and self.disk.exists("escrowmq.escrow"):
            self.disk.remove("escrowmq.escrow")
        return self.again(self.disk)

    def power_cut(self, survival: Survival = "none", seed: int = 0) -> EscrowBench:
        disk = self.disk.power_cut(Random(seed), survival)
        self.store.abandon()
        return self.again(disk)

    def cut_off(self, log_offset: int) -> EscrowBench:
        """The machine went off while it wrote: of the log there is what lies below."""
        disk, end = self.disk.power_cut(Random(0), "all"), self.store.end
        for base, _ in self.store.log_files():
            begin = max(base, log_offset)
            if begin < min(end, base + self.settings.segment_bytes):
                file = disk.open(f"commitlog/{base:020d}")
                size = min(end - begin, base + self.settings.segment_bytes - begin)
                file.write_at(begin - base, bytes(size))
                file.close()
        return self.again(disk)

    def remove_log_file(self) -> bool:
        """The oldest, as upkeep does it. False if it is still needed, or the only one."""
        end = self.store.begin + self.settings.segment_bytes
        self.store.checkpoint()
        if end >= self.store.end:
            return False
        transactions = self.broker.transactions
        keep_from = transactions.oldest_needed_offset()
        if keep_from is not None and keep_from < end:
            transactions.move_halves_below(end, self.now_ms)
            self.turn()
            self.store.checkpoint()
            keep_from = transactions.oldest_needed_offset()
        if keep_from is not None and keep_from < end:
            return False
        self.store.remove_oldest_file()
        self.store.checkpoint()
        return True

    # --- requests --------------------------------------------------------------------------------

    def park(self, key: str, **changes: Any) -> Place:
        line = changes.pop("line", None) or self.line
        self.turn(a_half(key, **changes), line=line)
        if self.sync:
            self.flush()
        return place_of(line.answer())

    def end(self, place: tuple[int, int], verdict: int, **changes: Any) -> Answer:
        line = changes.pop("line", None) or self.line
        self.turn(an_end(place, verdict, **changes), line=line)
        if self.sync:
            self.flush()
        return line.answer()

    def asks(self, request: Request[Any], line: FakeLine | None = None) -> Answer:
        self.turn(request, line=line)
        if self.sync:
            self.flush()
        return (line or self.line).answer()

    def register(self, writer: str = "w") -> WriterState:
        return writer_of(self.asks(a_registration(writer)))

    def heartbeat(self, line: FakeLine, *groups: str) -> None:
        self.turn(a_heartbeat(line, *groups), line=line)
        line.answers()

    def leave(self, line: FakeLine) -> None:
        line.is_open = False
        self.broker.channel_closed(line)

    # --- what is so ------------------------------------------------------------------------------

    def messages(self, topic: str = "T", queue_id: int = 0) -> list[StoredRecord]:
        """As a consumer reads them, from the first that is there."""
        found: list[StoredRecord] = []
        at = self.store.min_offset(topic, queue_id)
        while True:
            read = self.store.read(topic, queue_id, at)
            if not read.count:
                return found
            data, place = b"".join(bytes(piece) for piece in read.slices), 0
            while place < len(data):
                own_offset = int.from_bytes(data[place + 28 : place + 36], "big")
                record = decode_record(data, place, LogOffset(own_offset))
                found.append(record)
                place += record.size
            at = read.next_offset

    def bodies(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        return [bytes(record.body) for record in self.messages(topic, queue_id)]

    def state(self, place: tuple[int, int]) -> str:
        answer = self.end(place, UNKNOWN)
        assert answer.code == 0, answer.remark
        return answer.ext_fields["state"]

    def state_in_memory(self, place: tuple[int, int]) -> str:
        """The same without a turn."""
        half = self.escrow.find_open(*place)
        if half is not None:
            return "stranded" if half.is_stranded else "open"
        state = self.escrow.states.get(place[0])
        return "none" if state is None else state.text

    def cursors(self) -> tuple[int, int]:
        """As RocketMQ would find them."""
        half = self.broker.offsets.query(HALF_TOPIC, CURSOR_GROUP, 0)
        op = self.broker.offsets.query(OP_TOPIC, CURSOR_GROUP, 0)
        return half or 0, op or 0


# --- requests and answers ------------------------------------------------------------------------


def a_half(key: str, **changes: Any) -> Request[Any]:
    """A send as a transactional producer makes it. What no header has goes to the properties."""
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
    return a_send(body=body, producer_group=group, properties=text, **fields)


def an_end(place: tuple[int, int], verdict: int, **changes: Any) -> Request[Any]:
    one_way = changes.pop("one_way", False)
    fields = EndTransaction(
        producer_group=changes.pop("group", "p"),
        tran_state_table_offset=place[0],
        commit_log_offset=place[1],
        commit_or_rollback=verdict,
        from_transaction_check=changes.pop("check", False),
    )
    return ask(RequestCode.END_TRANSACTION, fields, flag=FLAG_ONEWAY if one_way else 0)


def an_end_of_many(
    places: list[tuple[int, int]], verdict: int, *, group: str = "p"
) -> Request[Any]:
    fields = EndTransactions(producer_group=group, commit_or_rollback=verdict)
    return ask(RequestCode.END_TRANSACTIONS, fields, encode_body(HalfPositions(halves=places)))


def a_registration(writer: str = "w") -> Request[Any]:
    return ask(RequestCode.REGISTER_WRITER, RegisterWriter(writer=writer))


def a_writer_query(writer: str = "w") -> Request[Any]:
    return ask(RequestCode.QUERY_WRITER, WriterHeader(writer=writer))


def a_batch_decision(
    batch: int,
    fence: int,
    winners: list[tuple[str, int]],
    *,
    writer: str = "w",
    last: bool = False,
) -> Request[Any]:
    fields = DecideBatch(writer=writer, batch=batch, fence=fence, last=last)
    named = [WinningAttempt(attempt=attempt, count=count) for attempt, count in winners]
    return ask(RequestCode.DECIDE_BATCH, fields, encode_body(BatchWinners(winners=named)))


def a_heartbeat(line: FakeLine, *groups: str) -> Request[Any]:
    producers = [ProducerEntry(group_name=group) for group in groups]
    beat = Heartbeat(client_id=f"client of {line.address}", producer_data_set=producers)
    return ask(RequestCode.HEART_BEAT, Header(), encode_body(beat))


def a_goodbye(line: FakeLine, group: str) -> Request[Any]:
    fields = UnregisterClient(client_id=f"client of {line.address}", producer_group=group)
    return ask(RequestCode.UNREGISTER_CLIENT, fields)


def place_of(answer: Answer) -> Place:
    assert answer.code == 0, answer.remark
    _, log_offset = decode_offset_id(answer.ext_fields["msgId"])
    return Place(int(answer.ext_fields["queueOffset"]), log_offset)


def append_final_without_op(bench: EscrowBench, half: Half) -> None:
    """Leave the log as a crash between the final and the op of a commit leaves it."""
    decision = bench.escrow.decide(
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


def writer_of(answer: Answer) -> WriterState:
    assert answer.code == 0, answer.remark
    return decode_body(WriterState, answer.body)


def questions(line: FakeLine) -> list[tuple[str, Place]]:
    """Which halves a line was asked about since the last time: key and place."""
    found = []
    for code, fields, _ in line.posted:
        if code == RequestCode.CHECK_TRANSACTION_STATE:
            assert isinstance(fields, CheckTransactionState)
            place = Place(fields.tran_state_table_offset, fields.commit_log_offset)
            found.append((fields.transaction_id or "", place))
    line.posted.clear()
    return found
