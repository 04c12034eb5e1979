"""Sends: check a message as RocketMQ does, make the record, and wait for the turn to end.

Whatever arrives in one turn of the event loop is appended in one write. So a send has two halves:
`accept` refuses it or puts its records into the batch; `settle`, once per turn, appends the batch
and answers everybody in it. Nobody is answered before his message is as durable as he asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from escrowmq.broker.line import Line
from escrowmq.broker.putcodes import CODES_OF_PUTS
from escrowmq.broker.sendproperties import has_unique_key, is_hasty, is_special
from escrowmq.broker.topics import (
    CLOSED_TO_SENDERS,
    RETRY_PREFIX,
    WRITE,
    Topics,
    refuse_bad_topic_name,
)
from escrowmq.errors import (
    BrokenBody,
    RecordRefused,
    RequestRefused,
    StoreError,
    StoreFailed,
)
from escrowmq.message.batch import decode_batch
from escrowmq.message.ids import UniqueKeys, encode_offset_id
from escrowmq.message.properties import change_properties
from escrowmq.message.record import PROPERTIES_BYTES_MAX, NewRecord
from escrowmq.message.sysflag import TRANSACTION_MASK
from escrowmq.store.configfiles import TopicConfig
from escrowmq.store.status import PutStatus, status_of
from escrowmq.store.store import MessageStore, Placed
from escrowmq.wire.answers import SendAnswers, answer
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import SendMessage, SendMessageAnswer

log = logging.getLogger(__name__)

_PROPERTIES_ROOM: Final = 512  # for what the broker itself adds

_MARKS: Final = ("POP_CK", "MSG_REGION", "TRACE_ON", "CLUSTER")
_W = TypeVar("_W", "_Waiting", "_Put")


def _split(ones: list[_W]) -> tuple[list[_W], list[_W]]:
    """Those who want their answer at once, and those who wait for the flush."""
    return [one for one in ones if not one.waits], [one for one in ones if one.waits]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRules:
    cluster: str
    store_host: bytes
    region: str = "DefaultRegion"
    trace_on: bool = True
    message_bytes_max: int = 4 << 20
    writable: bool = True  # brokerPermission


class _Waiting(msgspec.Struct, gc=False):
    """A send whose records are in the batch: `count` of them from `first` on."""

    line: Line
    request: Request[Any]
    first: int
    count: int
    queue_id: int  # that was asked for, wherever the record goes first
    waits: bool  # for the flush, if the broker flushes before it answers


class _Put(msgspec.Struct, gc=False):
    """Records of the broker's own in the batch."""

    first: int
    count: int
    done: Callable[[int], None]
    waits: bool


# Told the end of an append, calls back once it is durable, or is not in time.
WhenFlushed = Callable[[int, Callable[[PutStatus], None]], None]
# Looks at a record with special properties: the one to append, or a refusal.
Reroute = Callable[[NewRecord, int], NewRecord]


class Sends:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        rules: SendRules,
        keys: UniqueKeys,
        *,
        when_flushed: WhenFlushed | None = None,
        arrived: Callable[[Sequence[NewRecord]], None] = lambda records: None,
        reroute: Reroute = lambda record, now_ms: record,
        retried: Callable[[NewRecord, SendMessage, int, int], NewRecord] = lambda record, *_: (
            record
        ),
        seed: int = 0,
    ) -> None:
        self._store = store
        self._topics = topics
        self._rules = rules
        self._keys = keys
        self._when_flushed = when_flushed
        self._arrived = arrived
        self._reroute = reroute
        self._retried = retried
        self._random = Random(seed)
        self._answers = SendAnswers(
            store_host=rules.store_host, region=rules.region, trace_on=rules.trace_on
        )
        trace_on = "true" if rules.trace_on else "false"
        self._added = (
            f"MSG_REGION\x01{rules.region}\x02TRACE_ON\x01{trace_on}\x02"
            f"CLUSTER\x01{rules.cluster}\x02"
        ).encode()
        self._records: list[NewRecord] = []
        self._waiting: list[_Waiting] = []
        self._puts: list[_Put] = []

    # --- while the turn lasts --------------------------------------------------------------------

    def accept(self, line: Line, request: Request[SendMessage], now_ms: int) -> None:
        """Put it into this turn's batch, or raise RequestRefused."""
        fields = request.head.fields
        topic = self._topics.find(fields.topic)
        if topic is None or fields.topic in CLOSED_TO_SENDERS or not topic.perm & WRITE:
            topic = self._look_again(fields, now_ms)
        if topic.order and not self._rules.writable:
            raise RequestRefused(ResponseCode.NO_PERMISSION, "this broker is not writable")
        queue_id = fields.queue_id
        queues = max(topic.read_queue_nums, topic.write_queue_nums)
        if queue_id < 0 < topic.write_queue_nums:
            queue_id = self._random.randrange(topic.write_queue_nums)
        elif not 0 <= queue_id < queues:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queue {queue_id} of {fields.topic}, which has {queues}",
            )
        first = len(self._records)
        if fields.batch:
            self._records += self._batch_records(line, request, queue_id, now_ms)
        else:
            self._records.append(self._record(line, request, queue_id, now_ms))
        waits = "WAIT\x01false" not in fields.properties or not is_hasty(fields.properties)
        self._waiting.append(
            _Waiting(line, request, first, len(self._records) - first, queue_id, waits)
        )

    def put(
        self,
        records: Sequence[NewRecord],
        done: Callable[[int], None] = lambda code: None,
        *,
        waits: bool = True,
    ) -> None:
        """Records of the broker's own. `done` is told the answer's code once they are stored, as
        durably as a send would be, or once it is clear that they are not."""
        if records:
            self._puts.append(_Put(len(self._records), len(records), done, waits))
            self._records += records

    def _look_again(self, fields: SendMessage, now_ms: int) -> TopicConfig:
        """What the straight path does not decide: an unknown topic, or one nobody may send to."""
        refuse_bad_topic_name(fields.topic)
        if fields.topic in CLOSED_TO_SENDERS:
            raise RequestRefused(
                ResponseCode.NO_PERMISSION, f"{fields.topic} belongs to the broker"
            )
        topic = self._topics.find_or_make(
            fields.topic,
            template=fields.default_topic,
            queues=fields.default_topic_queue_nums,
            now_ms=now_ms,
        )
        if topic is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {fields.topic} does not exist, and may not be made here",
            )
        if not topic.perm & WRITE:
            raise RequestRefused(ResponseCode.NO_PERMISSION, f"{fields.topic} is not writable")
        return topic

    def _record(
        self, line: Line, request: Request[SendMessage], queue_id: int, now_ms: int
    ) -> NewRecord:
        fields = request.head.fields
        body = request.body
        self._refuse_long(len(body))
        record = NewRecord(
            topic=fields.topic,
            queue_id=queue_id,
            body=body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            properties=self._properties(fields.properties, now_ms),
            flag=fields.flag,
            sys_flag=fields.sys_flag,
            born_ms=fields.born_timestamp,
            born_host=line.peer_host,
            reconsume_times=fields.reconsume_times,
        )
        if fields.topic.startswith(RETRY_PREFIX):
            record = self._retried(record, fields, request.head.version, now_ms)
        if is_special(fields.properties):
            record = self._reroute(record, now_ms)
        return record

    def _properties(self, text: str, now_ms: int) -> bytes:
        """With a unique key, and marked as this broker's."""
        if "\0" in text:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a zero byte in the properties")
        encoded = text.encode()
        if len(encoded) > PROPERTIES_BYTES_MAX - _PROPERTIES_ROOM:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, f"properties of {len(encoded)} bytes are too long"
            )
        if "POP_CK\x01" in text or "MSG_REGION\x01" in text:
            # Sent on by a consumer: the marks of where it was consumed do not go along.
            encoded = change_properties(encoded, drop=_MARKS)
        if encoded and encoded[-1] != 2:
            encoded += b"\x02"
        if not has_unique_key(text):
            key = self._keys.next(now_ms=now_ms, month_began_ms=0)
            encoded += b"UNIQ_KEY\x01%s\x02" % key.encode()
        return encoded + self._added

    def _batch_records(
        self, line: Line, request: Request[SendMessage], queue_id: int, now_ms: int
    ) -> list[NewRecord]:
        fields = request.head.fields
        if fields.topic.startswith(RETRY_PREFIX) or fields.sys_flag & TRANSACTION_MASK:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a batch is neither a retry nor transactional"
            )
        self._refuse_long(len(request.body))
        try:
            items = decode_batch(request.body)
        except BrokenBody as error:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if not items:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a batch of no messages")
        records = []
        for item in items:
            text = str(item.properties, "utf-8", "replace")
            if is_special(text):
                raise RequestRefused(
                    ResponseCode.MESSAGE_ILLEGAL, "no message of a batch is delayed"
                )
            records.append(
                NewRecord(
                    topic=fields.topic,
                    queue_id=queue_id,
                    body=bytes(item.body),
                    properties=self._properties(text, now_ms),
                    flag=item.flag,
                    sys_flag=fields.sys_flag,
                    born_ms=fields.born_timestamp,
                    born_host=line.peer_host,
                    reconsume_times=fields.reconsume_times,
                )
            )
        return records

    def _refuse_long(self, body_bytes: int) -> None:
        if body_bytes > self._rules.message_bytes_max:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a body of {body_bytes} bytes, limit {self._rules.message_bytes_max}",
            )

    # --- when it ends ----------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """Append everything that was accepted, in one write, and answer."""
        records, self._records = self._records, []
        waiting, self._waiting = self._waiting, []
        puts, self._puts = self._puts, []
        if not records:
            return
        try:
            placed = self._store.append(records, now_ms=now_ms)
        except RecordRefused as error:
            if len(waiting) + len(puts) == 1:
                self._refuse_all(waiting, puts, error)
            else:
                self._settle_one_by_one(waiting, puts, records, now_ms)
            return
        except StoreError as error:
            self._refuse_all(waiting, puts, error)
            return
        except Exception as error:  # a bug of ours: nobody may wait for ever because of it
            log.exception("append failed records=%d", len(records))
            self._refuse_all(waiting, puts, StoreFailed(f"internal error: {error}"))
            return
        self._arrived(records)
        if self._when_flushed is None:
            self._answer_all(waiting, puts, placed, ResponseCode.SUCCESS)
            return
        hasty, patient = _split(waiting)
        hasty_puts, patient_puts = _split(puts)
        self._answer_all(hasty, hasty_puts, placed, ResponseCode.SUCCESS)
        if patient or patient_puts:

            def flushed(status: PutStatus) -> None:
                code = CODES_OF_PUTS.get(status, ResponseCode.SYSTEM_ERROR)
                self._answer_all(patient, patient_puts, placed, code)

            self._when_flushed(self._store.end, flushed)

    def _settle_one_by_one(
        self,
        waiting: list[_Waiting],
        puts: list[_Put],
        records: list[NewRecord],
        now_ms: int,
    ) -> None:
        """Somebody's record does not fit: the others of this turn must not pay for it."""
        everybody: list[_Waiting | _Put] = [*waiting, *puts]
        for one in everybody:
            self._records = records[one.first : one.first + one.count]
            one.first = 0
            self._waiting = [one] if isinstance(one, _Waiting) else []
            self._puts = [one] if isinstance(one, _Put) else []
            self.settle(now_ms)

    def _refuse_all(self, waiting: list[_Waiting], puts: list[_Put], error: StoreError) -> None:
        code = CODES_OF_PUTS.get(status_of(error), ResponseCode.SYSTEM_ERROR)
        for send in waiting:
            send.line.write(answer(send.request, code=code, remark=str(error)))
        for put in puts:
            put.done(code)

    def _answer_all(
        self,
        waiting: list[_Waiting],
        puts: list[_Put],
        placed: list[Placed],
        code: int,
    ) -> None:
        for put in puts:
            put.done(code)
        sent = self._answers.sent
        for send in waiting:
            place = placed[send.first]
            if send.count == 1:
                send.line.write(
                    sent(
                        send.request,
                        log_offset=place.log_offset,
                        queue_id=send.queue_id,
                        queue_offset=place.queue_offset,
                        code=code,
                    )
                )
            else:
                self._answer_batch(send, placed, code)

    def _answer_batch(self, send: _Waiting, placed: list[Placed], code: int) -> None:
        places = placed[send.first : send.first + send.count]
        host = self._rules.store_host
        fields = SendMessageAnswer(
            msg_id=",".join(encode_offset_id(host, place.log_offset) for place in places),
            queue_id=send.queue_id,
            queue_offset=places[0].queue_offset,
            region=self._rules.region,
            trace_on=self._rules.trace_on,
        )
        send.line.write(answer(send.request, fields, code=code))
