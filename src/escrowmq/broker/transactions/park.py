"""Park transactional sends: store the message where no consumer reads, and respond as to any send.

    SendProcessor ── plain properties ──▶ park_plain ─┐
                  └─ anything else ─────▶ park ───────┴▶ coordinator.park, Turn.add(PendingHalf)
    stored      ▶ coordinator.parked: the half is open, its first check is scheduled
    not stored  ▶ coordinator.park_failed

A send whose unique key was parked before by the same group is a repeated one: its response got
lost. It gets the position of the first one, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.statistics import TRANSACTION, BrokerCounters
from escrowmq.broker.turn import Turn
from escrowmq.errors import RecordRefused, RequestRefused
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.half_table import CACHED_BODY_BYTES_MAX, Half
from escrowmq.escrow.records import (
    HALF_RESERVED_BYTES,
    UNIQUE_KEY_BYTES_MAX,
    check_half_limits,
    check_half_names,
    make_half,
    make_plain_half,
    parse_half,
)
from escrowmq.message import names
from escrowmq.message.broker_marks import CLIENT_SYS_FLAGS
from escrowmq.message.record import NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult

_FIXED_RECORD_BYTES: Final = 512  # more than all of a record except body and properties
_SHORT_GROUP_LENGTH: Final = 63  # within the limit, however it is encoded
_STORED_RECORD: Final = NewRecord(names.HALF_TOPIC, 0, b"", b"")  # of a half that is in the log


class HalfProcessor:
    def __init__(
        self,
        turn: Turn,
        coordinator: TransactionCoordinator,
        counters: BrokerCounters,
        *,
        segment_bytes: int,
        rejects_transactions: bool = False,
    ) -> None:
        """`segment_bytes`: the size of a file of the log; a record is in one file."""
        self.counters = counters
        self.half_bytes_max = segment_bytes - _FIXED_RECORD_BYTES - HALF_RESERVED_BYTES
        self.coordinator = coordinator
        self.rejects_transactions = rejects_transactions
        self._turn = turn

    def park(
        self,
        channel: Channel,
        request: Request[SendMessage],
        record: NewRecord,
        now_ms: int,
        waits_for_flush: bool,
        packed_count: int = 0,
    ) -> None:
        """Park a message with any properties.

        `packed_count`: the number of messages in its body, if it is packed.
        """
        if self.rejects_transactions:
            raise _transactions_rejected()
        half_record = make_half(record, packed_count=packed_count)
        properties = parse_half(half_record)
        assert properties is not None, "make_half() writes the topic and the queue"
        check_half_names(properties.group, properties.key)
        check_half_limits(properties.key, properties.group, len(half_record.properties))
        half = self.coordinator.new_half(
            properties.topic,
            properties.queue_id,
            properties.group,
            properties.key,
            now_ms,
            channel,
            properties.immunity_ms,
        )
        half.attempt = properties.attempt
        self._park(PendingHalf(self, channel, request, half, half_record, None, waits_for_flush))

    def park_plain(
        self,
        channel: Channel,
        request: Request[SendMessage],
        queue_id: int,
        added_properties: str,
        now_ms: int,
    ) -> None:
        """Park a message with ordinary properties only. Does the same as `park()`, faster."""
        if self.rejects_transactions:
            raise _transactions_rejected()
        fields = request.head.fields
        properties, final_properties, group, key, tags_and_keys = make_plain_half(
            fields.properties, added_properties, fields.topic, queue_id
        )
        if not (key.isalnum() and group.isprintable()):
            check_half_names(group, key)
        # The properties are short, so only the names have to be checked.
        if len(key) > UNIQUE_KEY_BYTES_MAX or len(group) > _SHORT_GROUP_LENGTH:
            check_half_limits(key, group, len(properties))
        body = request.body
        cached_properties = None
        if len(body) <= CACHED_BODY_BYTES_MAX:
            body = bytes(body)  # the cached final outlives the buffer that this is a view of
            cached_properties = final_properties
        half_record = NewRecord(
            names.HALF_TOPIC,
            0,
            body,  # type: ignore[arg-type]  # if it is a view: it is appended in this turn
            properties,
            fields.flag,
            fields.sys_flag & CLIENT_SYS_FLAGS,
            fields.born_timestamp,
            channel.peer_host,
            max(0, fields.reconsume_times),
            0,
            tags_and_keys,
        )
        half = self.coordinator.new_half(fields.topic, queue_id, group, key, now_ms, channel)
        self._park(PendingHalf(self, channel, request, half, half_record, cached_properties, True))

    def _park(self, pending: PendingHalf) -> None:
        record = pending.record
        size = len(record.body) + len(record.properties)
        if size > self.half_bytes_max:
            raise RecordRefused(
                f"the transactional message is {size} bytes, the limit is {self.half_bytes_max}, "
                "because it is stored in one file of the log (mapedFileSizeCommitLog)"
            )
        is_new = self.coordinator.park(pending.half, size)
        if is_new:
            self._turn.add(pending, (record,))
        else:
            self._turn.add_records(
                [], pending.on_duplicate_done, waits_for_flush=pending.waits_for_flush
            )


class PendingHalf(msgspec.Struct, gc=False):
    """A half whose record is in the turn's batch. A `PendingAppend`."""

    processor: HalfProcessor
    channel: Channel
    request: Request[SendMessage]
    half: Half
    record: NewRecord
    final_properties: bytes | None  # None: do not cache the final
    waits_for_flush: bool
    first_index: int = 0
    count: int = 1

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        result, processor, half = results[self.first_index], self.processor, self.half
        processor.coordinator.parked(half, result, self.record, self.final_properties)
        processor.counters.record_message(half.topic, TRANSACTION, result.size)
        # The body is in the log. The response may wait for a flush, and needs neither of these.
        request = self.request
        self.request = Request(request.head, b"", request.serializer)
        self.record = _STORED_RECORD

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if results:
            result = results[self.first_index]
            self._respond(result.queue_offset, result.log_offset, code)
        else:
            self.processor.coordinator.park_failed(self.half)
            self._refuse(code)

    def on_duplicate_done(self, code: int, results: Sequence[AppendResult]) -> None:
        """Respond to a repeated send, once the half that was sent first is durable."""
        position = self.processor.coordinator.find_duplicate(*self.half.group_topic_key)
        if position is None or code != ResponseCode.SUCCESS:
            self._refuse(code or ResponseCode.SYSTEM_ERROR)
        else:
            self._respond(*position, code)

    def _respond(self, queue_offset: int, log_offset: int, code: int) -> None:
        half = self.half
        key = half.key.decode("utf-8", "replace")
        self.channel.respond_send(self.request, log_offset, half.queue_id, queue_offset, code, key)

    def _refuse(self, code: int) -> None:
        self.processor.counters.refused[self.request.head.code, code] += 1
        self.channel.respond(self.request, code=code, remark="the half message was not stored")


def _transactions_rejected() -> RequestRefused:
    return RequestRefused(
        ResponseCode.NO_PERMISSION,
        "this broker does not accept transactional messages (rejectTransactionMessage)",
    )
