"""Parking: a transactional send is stored where no consumer looks, and answered like any send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.statistics import TRANSACTION, BrokerCounters
from escrowmq.broker.turn import Turn
from escrowmq.errors import RequestRefused
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.half_table import CACHED_BODY_BYTES_MAX, CachedFinal, FinalCache, Half
from escrowmq.escrow.records import make_half, make_plain_half, parse_half
from escrowmq.message import names
from escrowmq.message.record import TRANSACTION_MASK, NewRecord
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult

_REJECTED: Final = "this broker does not take transactional messages"


class HalfProcessor:
    def __init__(
        self,
        turn: Turn,
        coordinator: TransactionCoordinator,
        counters: BrokerCounters,
        *,
        rejects_transactions: bool = False,
    ) -> None:
        self.counters = counters
        self._turn = turn
        self.rejects_transactions = rejects_transactions
        self.coordinator = coordinator
        self.final_cache = FinalCache()
        self.keys_in_turn: set[tuple[str, bytes]] = set()  # groups and keys of this turn's halves

    def park(
        self,
        channel: Channel,
        request: Request[SendMessage],
        record: NewRecord,
        now_ms: int,
        waits_for_flush: bool,
        packed_count: int = 0,
    ) -> None:
        """A send with TRAN_MSG: stored where no consumer looks, answered like any send.

        `packed`: its body holds so many messages.
        """
        if self.rejects_transactions:
            raise RequestRefused(ResponseCode.NO_PERMISSION, _REJECTED)
        half = make_half(record, packed_count=packed_count)
        facts = parse_half(half)
        assert facts is not None, "half_of says where it wants to go"
        entry = self.coordinator.new_half(
            facts.topic, facts.queue_id, facts.group, facts.key, now_ms, channel, facts.immunity_ms
        )
        entry.attempt = facts.attempt
        self._park(_PendingHalf(self, channel, request, entry, None, waits_for_flush), half)

    def park_plain(
        self,
        channel: Channel,
        request: Request[SendMessage],
        queue_id: int,
        added_properties: str,
        now_ms: int,
    ) -> None:
        """The same for one with nothing out of the ordinary in its properties."""
        if self.rejects_transactions:
            raise RequestRefused(ResponseCode.NO_PERMISSION, _REJECTED)
        fields, host = request.head.fields, channel.peer_host
        properties, of_final, group, key, derived = make_plain_half(
            fields.properties, added_properties, fields.topic, queue_id
        )
        body, fresh = request.body, None
        flag, sys_flag = fields.flag, fields.sys_flag & ~TRANSACTION_MASK
        born_ms, times = fields.born_timestamp, fields.reconsume_times
        if len(body) <= CACHED_BODY_BYTES_MAX:
            body = bytes(body)
            fresh = CachedFinal(body, of_final, derived, flag, sys_flag, born_ms, host, times)
        half = NewRecord(
            names.HALF_TOPIC,
            0,
            body,  # type: ignore[arg-type]  # if a view: it is appended before this turn ends
            properties,
            flag,
            sys_flag,
            born_ms,
            host,
            times,
            0,
            derived,
        )
        entry = self.coordinator.new_half(fields.topic, queue_id, group, key, now_ms, channel)
        self._park(_PendingHalf(self, channel, request, entry, fresh, True), half)

    def _park(self, pending_half: _PendingHalf, half: NewRecord) -> None:
        entry, escrow = pending_half.half, self.coordinator
        sent = entry.group, entry.key
        if sent in self.keys_in_turn or escrow.find_duplicate(*sent) is not None:
            escrow.counters.duplicate_sends += 1
            self._turn.add_records(
                [], pending_half.on_duplicate_done, waits_for_flush=pending_half.waits_for_flush
            )
            return
        escrow.check_limits(entry.group, len(half.body) + len(half.properties))
        self.keys_in_turn.add(sent)
        self._turn.add(pending_half, (half,))


class _PendingHalf(msgspec.Struct, gc=False):
    """A half on its way into the log, and whom to tell. A part of the turn."""

    processor: HalfProcessor
    channel: Channel
    request: Request[SendMessage]
    half: Half
    cached_final: CachedFinal | None
    waits_for_flush: bool
    first_index: int = 0
    count: int = 1

    def on_stored(self, results: Sequence[AppendResult]) -> None:
        place, owner, half = results[self.first_index], self.processor, self.half
        half.queue_offset, half.log_offset = place.queue_offset, place.log_offset
        half.size = place.size
        owner.keys_in_turn.discard((half.group, half.key))
        owner.coordinator.counters.parked += 1
        owner.counters.record_message(half.topic, TRANSACTION, place.size)
        owner.coordinator.track(half)
        if self.cached_final is not None:
            owner.final_cache.put(place.queue_offset, self.cached_final)

    def on_done(self, code: int, results: Sequence[AppendResult]) -> None:
        if results:
            place = results[self.first_index]
            self._respond(place.queue_offset, place.log_offset, code)
        else:
            self.processor.keys_in_turn.discard((self.half.group, self.half.key))
            self._fail(code)

    def on_duplicate_done(self, code: int, results: Sequence[AppendResult]) -> None:
        """It was sent before, and this is the answer that got lost."""
        found = self.processor.coordinator.find_duplicate(self.half.group, self.half.key)
        if found is None or code != ResponseCode.SUCCESS:
            self._fail(code or ResponseCode.SYSTEM_ERROR)
        else:
            self._respond(*found, code)

    def _respond(self, queue_offset: int, log_offset: int, code: int) -> None:
        half = self.half
        key = half.key.decode("utf-8", "replace")
        self.channel.respond_send(self.request, log_offset, half.queue_id, queue_offset, code, key)

    def _fail(self, code: int) -> None:
        self.processor.counters.refused[self.request.head.code, code] += 1
        self.channel.respond(self.request, code=code, remark="the half was not stored")
