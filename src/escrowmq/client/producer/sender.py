"""Get a message stored: to a queue that works, and again if that may help.

One message as it goes out: its properties as text, its body compressed if that helps.

Made once per message and used for every attempt, so that all of them carry the same unique key: a
broker of ours that has it already says so.

One request to one queue, and what its answer says.

Brokers that are slow or fail are passed over for a while; the slower, the longer.

    an answer took      passed over for
    550 ms              2 s
    1.8 s               5 s
    3 s                 6 s
    5 s, or it failed   10 s
    15 s                30 s

The steps are RocketMQ's. Passing over is never a refusal: if nobody else is there, the one whose
time ends first is asked.

Many messages of one topic in one request: what may go together, and how much.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from escrowmq.client.connection import Reply
from escrowmq.client.heartbeat import Presence
from escrowmq.client.messages import Message, Queue, SendResult, SendStatus
from escrowmq.client.routes import QUEUES_MADE, TEMPLATE, Route, Routes
from escrowmq.clock import Clock, since_1970_ms
from escrowmq.errors import (
    EscrowError,
    LocalProtocolError,
    NoRoute,
    OutcomeUnknown,
    RequestRefused,
    TransportError,
)
from escrowmq.message import names
from escrowmq.message import record as sysflag
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.compression import compress_body
from escrowmq.message.keys import java_hash
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Body

SHARDING_KEY: Final = "__SHARDINGKEY"
DELAY_MS: Final = "TIMER_DELAY_MS"
DELIVER_MS: Final = "TIMER_DELIVER_MS"
COMPRESS_OVER: Final = 4096
KINDS: Final = {
    "zlib": sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSION_ZSTD,
}


class Packed(NamedTuple):
    topic: str  # as the broker knows it
    body: Body
    properties: str
    sys_flag: int
    flag: int
    message_id: str
    sharding_key: str = ""
    batch: bool = False


class Packer:
    """`over`: bodies longer than so many bytes are compressed; None for never."""

    def __init__(self, *, over: int | None = COMPRESS_OVER, kind: str = "zlib") -> None:
        if kind not in KINDS:
            raise ValueError(f"compression is one of {', '.join(KINDS)}, not {kind!r}")
        if over is not None and over < 0:
            raise ValueError(f"compress_over is a number of bytes, or None; not {over}")
        self._over = over
        self._kind = KINDS[kind]

    def pack(
        self,
        message: Message,
        topic: str,
        unique_key: str,
        *,
        more: Mapping[str, str] | None = None,
        sys_flag: int = 0,
        delays: bool = True,
    ) -> Packed:
        """`more` properties win over its own. `delays=False` leaves its delay out."""
        body = message.body
        if self._over is not None and len(body) > self._over:
            smaller = compress_body(body, self._kind)
            if len(smaller) < len(body):
                body = smaller
                sys_flag = sysflag.with_compression(sys_flag, self._kind)
        message_id = message.properties.get(names.UNIQUE_KEY) or unique_key
        text = properties_text(message, message_id, more, delays=delays)
        return Packed(topic, body, text, sys_flag, message.flag, message_id, message.sharding_key)


def properties_text(
    message: Message,
    message_id: str,
    more: Mapping[str, str] | None = None,
    *,
    delays: bool = True,
) -> str:
    """Its own, and those that say what the others of its fields say, in RocketMQ's form."""
    found = {names.UNIQUE_KEY: message_id, names.WAIT_STORED: "true"}
    if message.properties:
        found |= message.properties
    keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
    if keys:
        found[names.KEYS] = keys
    if message.tags:
        found[names.TAGS] = message.tags
    if message.sharding_key:
        found[SHARDING_KEY] = message.sharding_key
    if delays and message.is_delayed:
        found |= _delay_of(message)
    if more:
        found |= more
    text = "".join([f"{name}\x01{value}\x02" for name, value in found.items()])
    # Every name and every value is followed by its own separator, and no other is in the text.
    if text.count("\x01") != len(found) or text.count("\x02") != len(found):
        raise LocalProtocolError("a property contains a separator (0x01 or 0x02)")
    if text[0] == "\x01" or "\x01\x02" in text or "\x02\x01" in text:
        raise LocalProtocolError(f"a property without name or value: {message.properties}")
    return text


def _delay_of(message: Message) -> dict[str, str]:
    if message.delay_level:
        return {names.DELAY_LEVEL: str(message.delay_level)}
    if message.deliver_at is not None:
        return {DELIVER_MS: str(since_1970_ms(message.deliver_at))}
    return {DELAY_MS: str(max(1, round(message.delay_s * 1000)))}


_STATUSES: Final = {status.value: status for status in SendStatus}
_QUEUES_MADE: Final = str(QUEUES_MADE)


def send_fields(packed: Packed, queue: Queue, *, group: str, now_ms: int) -> dict[str, str]:
    """Of SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE, by their short names (headers_send.py). Written
    out: this is on the path of every send."""
    return {
        "a": group,
        "b": packed.topic,
        "c": TEMPLATE,
        "d": _QUEUES_MADE,
        "e": str(queue.queue_id),
        "f": str(packed.sys_flag),
        "g": str(now_ms),
        "h": str(packed.flag),
        "i": packed.properties,
        "j": "0",
        "k": "false",
        "m": "true" if packed.batch else "false",
        "n": queue.broker,
    }


def result_of(reply: Reply, queue: Queue, message_id: str) -> SendResult:
    """Raises RequestRefused: it is not stored there."""
    status = _STATUSES.get(reply.code)
    if status is None:
        raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")
    fields = reply.ext_fields
    queue_id = int(fields.get("queueId", queue.queue_id))
    return SendResult(
        status,
        message_id,
        fields.get("msgId", ""),
        queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id),
        int(fields.get("queueOffset", -1)),
        fields.get("transactionId", ""),
    )


_STEPS: Final = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
SLOW_S: Final = _STEPS[-1][0]
FAILED_S: Final = 10.0  # a failure counts as an answer that took so long


def avoided_s(latency_s: float) -> float:
    return next((avoided for slow, avoided in _STEPS if latency_s >= slow), 0.0)


class Faults:
    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # by broker

    def answered(self, broker: str, latency_s: float, now_s: float) -> None:
        if latency_s >= SLOW_S:
            self._until[broker] = now_s + avoided_s(latency_s)
        elif self._until:
            self._until.pop(broker, None)

    def failed(self, broker: str, now_s: float) -> None:
        self._until[broker] = now_s + avoided_s(FAILED_S)

    def is_avoided(self, broker: str, now_s: float) -> bool:
        return self._until.get(broker, 0.0) > now_s

    def fit(self, queues: Sequence[Queue], tried: set[str], now_s: float) -> Sequence[Queue]:
        """Those to choose from: of brokers that are well, and were not tried for this message."""
        if not tried and not self._until:
            return queues
        untried = [queue for queue in queues if queue.broker not in tried] or queues
        well = [queue for queue in untried if not self.is_avoided(queue.broker, now_s)]
        if well:
            return well
        first = min((queue.broker for queue in untried), key=lambda name: self._until[name])
        return [queue for queue in untried if queue.broker == first]


log = logging.getLogger(__name__)

Pick = Callable[[Sequence[Queue]], Queue]


class Sender:
    def __init__(
        self,
        group: str,
        routes: Routes,
        presence: Presence,
        clock: Clock,
        *,
        timeout_s: float,
        retries: int,
        first_turn: int,
    ) -> None:
        self._group = group
        self._routes = routes
        self._presence = presence
        self._clock = clock
        self._timeout_s = timeout_s
        self._retries = retries
        self._turn = itertools.count(first_turn)
        self.faults = Faults()

    async def send(self, packed: Packed, pick: Pick | None = None) -> SendResult:
        """Raises TransportError or RequestRefused. `pick` chooses among the topic's queues."""
        tried: set[str] = set()
        unsure: EscrowError | None = None
        for attempt in itertools.count():
            queue: Queue | None = None
            try:
                queue = self._choose_now(packed, pick, tried) or await self._choose(
                    packed, pick, tried
                )
                return await self._send_to(queue, packed)
            except (TransportError, RequestRefused) as error:
                if error.may_have_happened:
                    unsure = error
                if queue is None or attempt >= self._retries or not error.retriable:
                    if unsure is None or unsure is error:
                        raise
                    # An attempt before may have got through: the last error must not deny it.
                    raise OutcomeUnknown(f"{error}; and before that: {unsure}") from error
                tried.add(queue.broker)
                log.info("send tried again broker=%s: %s", queue.broker, error)
        raise AssertionError("the loop ends with a result or an error")

    async def post(self, packed: Packed, pick: Pick | None = None) -> None:
        """One way. Raises NotSent, NoRoute."""
        queue = await self._choose(packed, pick, set())
        line = await self._presence.line(queue.address)
        await line.room()
        now_ms = self._clock.now_ms()
        fields = send_fields(packed, queue, group=self._group, now_ms=now_ms)
        line.post(RequestCode.SEND_MESSAGE_V2, fields, packed.body)

    async def queues(self, topic: str) -> tuple[Queue, ...]:
        """Those that can be written to. Raises NoRoute."""
        route = await self._routes.to_write(topic)
        if not route.writable:
            raise NoRoute(f"no queue of {topic} can be written to")
        return route.writable

    async def _send_to(self, queue: Queue, packed: Packed) -> SendResult:
        clock = self._clock
        began_s = clock.elapsed_s()
        try:
            address = queue.address
            line = self._presence.ready(address) or await self._presence.line(address)
            fields = send_fields(packed, queue, group=self._group, now_ms=clock.now_ms())
            code = RequestCode.SEND_MESSAGE_V2
            if packed.batch:
                code = RequestCode.SEND_BATCH_MESSAGE
            reply = await line.call(code, fields, packed.body, timeout_s=self._timeout_s)
            result = result_of(reply, queue, packed.message_id)
        except (TransportError, RequestRefused) as error:
            if error.retriable:
                self.faults.failed(queue.broker, clock.elapsed_s())
            raise
        now_s = clock.elapsed_s()
        self.faults.answered(queue.broker, now_s - began_s, now_s)
        return result

    def _choose_now(self, packed: Packed, pick: Pick | None, tried: set[str]) -> Queue | None:
        """Without asking anybody, if the route is known and nothing has failed yet."""
        if tried or (route := self._routes.known(packed.topic)) is None:
            return None
        return self._choose_of(route, packed, pick, tried)

    async def _choose(self, packed: Packed, pick: Pick | None, tried: set[str]) -> Queue:
        route = await self._route(packed.topic, is_again=bool(tried))
        return self._choose_of(route, packed, pick, tried)

    def _choose_of(self, route: Route, packed: Packed, pick: Pick | None, tried: set[str]) -> Queue:
        queues: Sequence[Queue] = route.writable
        if not queues:
            raise NoRoute(f"no queue of {packed.topic} can be written to")
        if pick is not None:
            return pick(queues)
        if packed.sharding_key:
            return queue_of_key(packed.sharding_key, route)
        fit = self.faults.fit(queues, tried, self._clock.elapsed_s())
        return fit[next(self._turn) % len(fit)]

    async def _route(self, topic: str, *, is_again: bool) -> Route:
        known = self._routes.known(topic)
        try:
            return await self._routes.to_write(topic, fresh=is_again)
        except NoRoute:
            raise
        except TransportError:
            if known is None:
                raise
            return known  # no name server answers now; another broker of the old route may


def queue_of_key(sharding_key: str, route: Route) -> Queue:
    """The same as RocketMQ's clients choose by hash, so that both keep one order."""
    queues: Sequence[Queue] = route.writable
    if route.is_template:
        # The first send makes the topic on one broker: already choose as if it were so.
        queues = [queue for queue in queues if queue.broker == queues[0].broker]
    return queues[abs(int(math.fmod(java_hash(sharding_key), len(queues))))]


BATCH_BYTES_MAX: Final = 1 << 20  # of one request; a broker takes 4 MiB unless it is told otherwise
_AROUND_BYTES: Final = 22  # what the layout adds to body and properties of each

Item = tuple[str, BatchItem]  # with the message's id


def refuse_mixed(messages: Sequence[Message]) -> None:
    """Raises LocalProtocolError: these cannot be one batch."""
    if not messages:
        raise LocalProtocolError("a batch has a message at least")
    first = messages[0]
    for message in messages:
        if message.topic != first.topic:
            raise LocalProtocolError(
                f"a batch is of one topic, not of {first.topic} and {message.topic}: "
                "send a batch for each"
            )
        if message.sharding_key != first.sharding_key:
            raise LocalProtocolError(
                "a batch goes to one queue, so all of it has one sharding key: send one for each"
            )
        if message.is_delayed:
            raise LocalProtocolError("no message of a batch is delayed: send it by itself")
        if names.TRANSACTIONAL in message.properties:
            raise LocalProtocolError(
                "no message of a batch is transactional: use producer.transaction, which decides "
                "any number of messages at once"
            )


def items_of(
    messages: Iterable[Message], keys: Iterator[str], more: Mapping[str, str]
) -> list[Item]:
    """`more`: properties that all of them get."""
    items = []
    for message in messages:
        message_id = message.properties.get(names.UNIQUE_KEY) or next(keys)
        properties = properties_text(message, message_id, more).encode()
        items.append((message_id, BatchItem(message.flag, message.body, properties)))
    return items


def cut(items: Sequence[Item], bytes_max: int) -> Iterator[list[Item]]:
    """In order, as many to a request as fit; a message that is longer than that goes alone."""
    chunk: list[Item] = []
    filled = 0
    for item in items:
        size = _AROUND_BYTES + len(item[1].body) + len(item[1].properties)
        if chunk and filled + size > bytes_max:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += size
    if chunk:
        yield chunk


def pack_batch(topic: str, chunk: Sequence[Item], sharding_key: str) -> Packed:
    return Packed(
        topic,
        encode_batch(item for _, item in chunk),
        f"{names.WAIT_STORED}\x01true\x02",
        0,
        0,
        chunk[0][0],
        sharding_key,
        batch=True,
    )


def results_of(result: SendResult, ids: Sequence[str]) -> list[SendResult]:
    """One for each message, from the answer to all: their places follow each other."""
    places = result.offset_id.split(",")
    places += [""] * (len(ids) - len(places))
    return [
        SendResult(result.status, message_id, place, result.queue, result.queue_offset + number)
        for number, (message_id, place) in enumerate(zip(ids, places, strict=False))
    ]
