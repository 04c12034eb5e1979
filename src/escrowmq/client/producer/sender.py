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

from escrowmq.client.heartbeat import ProducerHeartbeat
from escrowmq.client.messages import Message, MessageQueue, SendResult, SendStatus
from escrowmq.client.routes import DEFAULT_QUEUE_COUNT, Route, Routes
from escrowmq.clock import Clock, epoch_ms
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
from escrowmq.message.names import SHARDING_KEY, TEMPLATE_TOPIC, TIMER_DELAY_MS, TIMER_DELIVER_MS
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.requests import Body

DEFAULT_COMPRESS_ABOVE_BYTES: Final = 4096
COMPRESSION_FLAGS: Final = {
    "zlib": sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSION_ZSTD,
}


class EncodedMessage(NamedTuple):
    topic: str  # as the broker knows it
    body: Body
    properties: str
    sys_flag: int
    flag: int
    message_id: str
    sharding_key: str = ""
    is_batch: bool = False


class MessageEncoder:
    """`over`: bodies longer than so many bytes are compressed; None for never."""

    def __init__(
        self,
        *,
        compress_above_bytes: int | None = DEFAULT_COMPRESS_ABOVE_BYTES,
        compression: str = "zlib",
    ) -> None:
        if compression not in COMPRESSION_FLAGS:
            raise ValueError(
                f"compression is one of {', '.join(COMPRESSION_FLAGS)}, not {compression!r}"
            )
        if compress_above_bytes is not None and compress_above_bytes < 0:
            raise ValueError(
                f"compress_over is a number of bytes, or None; not {compress_above_bytes}"
            )
        self._compress_above_bytes = compress_above_bytes
        self._compression_flag = COMPRESSION_FLAGS[compression]

    def encode(
        self,
        message: Message,
        topic: str,
        unique_key: str,
        *,
        extra_properties: Mapping[str, str] | None = None,
        sys_flag: int = 0,
        with_delay: bool = True,
    ) -> EncodedMessage:
        """`more` properties win over its own. `delays=False` leaves its delay out."""
        body = message.body
        if self._compress_above_bytes is not None and len(body) > self._compress_above_bytes:
            smaller = compress_body(body, self._compression_flag)
            if len(smaller) < len(body):
                body = smaller
                sys_flag = sysflag.with_compression(sys_flag, self._compression_flag)
        message_id = message.properties.get(names.UNIQUE_KEY) or unique_key
        text = properties_text(message, message_id, extra_properties, with_delay=with_delay)
        return EncodedMessage(
            topic, body, text, sys_flag, message.flag, message_id, message.sharding_key
        )


def properties_text(
    message: Message,
    message_id: str,
    extra_properties: Mapping[str, str] | None = None,
    *,
    with_delay: bool = True,
) -> str:
    """Its own, and those that say what the others of its fields say, in RocketMQ's form."""
    found = {names.UNIQUE_KEY: message_id, names.WAIT_STORE_OK: "true"}
    if message.properties:
        found |= message.properties
    keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
    if keys:
        found[names.KEYS] = keys
    if message.tags:
        found[names.TAGS] = message.tags
    if message.sharding_key:
        found[SHARDING_KEY] = message.sharding_key
    if with_delay and message.is_delayed:
        found |= _delay_properties(message)
    if extra_properties:
        found |= extra_properties
    text = "".join([f"{name}\x01{value}\x02" for name, value in found.items()])
    # Every name and every value is followed by its own separator, and no other is in the text.
    if text.count("\x01") != len(found) or text.count("\x02") != len(found):
        raise LocalProtocolError("a property contains a separator (0x01 or 0x02)")
    if text[0] == "\x01" or "\x01\x02" in text or "\x02\x01" in text:
        raise LocalProtocolError(f"a property without name or value: {message.properties}")
    return text


def _delay_properties(message: Message) -> dict[str, str]:
    if message.delay_level:
        return {names.DELAY_LEVEL: str(message.delay_level)}
    if message.deliver_at is not None:
        return {TIMER_DELIVER_MS: str(epoch_ms(message.deliver_at))}
    return {TIMER_DELAY_MS: str(max(1, round(message.delay_s * 1000)))}


_STATUSES: Final = {status.value: status for status in SendStatus}
_DEFAULT_QUEUE_COUNT: Final = str(DEFAULT_QUEUE_COUNT)


def send_fields(
    message: EncodedMessage, queue: MessageQueue, *, group: str, now_ms: int
) -> dict[str, str]:
    """Of SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE, by their short names (headers_send.py). Written
    out: this is on the path of every send."""
    return {
        "a": group,
        "b": message.topic,
        "c": TEMPLATE_TOPIC,
        "d": _DEFAULT_QUEUE_COUNT,
        "e": str(queue.queue_id),
        "f": str(message.sys_flag),
        "g": str(now_ms),
        "h": str(message.flag),
        "i": message.properties,
        "j": "0",
        "k": "false",
        "m": "true" if message.is_batch else "false",
        "n": queue.broker,
    }


def parse_send_result(reply: Reply, queue: MessageQueue, message_id: str) -> SendResult:
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


_AVOIDANCE_STEPS: Final = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
SLOW_LATENCY_S: Final = _AVOIDANCE_STEPS[-1][0]
FAILURE_LATENCY_S: Final = 10.0  # a failure counts as an answer that took so long


def avoidance_s(latency_s: float) -> float:
    return next((avoided for slow, avoided in _AVOIDANCE_STEPS if latency_s >= slow), 0.0)


class LatencyFaultTolerance:
    def __init__(self) -> None:
        self._avoided_until_s: dict[str, float] = {}  # by broker

    def record_response(self, broker: str, latency_s: float, now_s: float) -> None:
        if latency_s >= SLOW_LATENCY_S:
            self._avoided_until_s[broker] = now_s + avoidance_s(latency_s)
        elif self._avoided_until_s:
            self._avoided_until_s.pop(broker, None)

    def record_failure(self, broker: str, now_s: float) -> None:
        self._avoided_until_s[broker] = now_s + avoidance_s(FAILURE_LATENCY_S)

    def is_avoided(self, broker: str, now_s: float) -> bool:
        return self._avoided_until_s.get(broker, 0.0) > now_s

    def usable_queues(
        self, queues: Sequence[MessageQueue], tried_brokers: set[str], now_s: float
    ) -> Sequence[MessageQueue]:
        """Those to choose from: of brokers that are well, and were not tried for this message."""
        if not tried_brokers and not self._avoided_until_s:
            return queues
        untried = [queue for queue in queues if queue.broker not in tried_brokers] or queues
        well = [queue for queue in untried if not self.is_avoided(queue.broker, now_s)]
        if well:
            return well
        first = min(
            (queue.broker for queue in untried), key=lambda name: self._avoided_until_s[name]
        )
        return [queue for queue in untried if queue.broker == first]


log = logging.getLogger(__name__)

ChooseQueue = Callable[[Sequence[MessageQueue]], MessageQueue]


class MessageSender:
    def __init__(
        self,
        group: str,
        routes: Routes,
        heartbeat: ProducerHeartbeat,
        clock: Clock,
        *,
        timeout_s: float,
        retries: int,
        first_index: int,
    ) -> None:
        self._group = group
        self._routes = routes
        self._heartbeat = heartbeat
        self._clock = clock
        self._timeout_s = timeout_s
        self._retries = retries
        self._round_robin = itertools.count(first_index)
        self.fault_tolerance = LatencyFaultTolerance()

    async def send(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None = None
    ) -> SendResult:
        """Raises TransportError or RequestRefused. `pick` chooses among the topic's queues."""
        tried: set[str] = set()
        unsure: EscrowError | None = None
        for attempt in itertools.count():
            queue: MessageQueue | None = None
            try:
                queue = self._choose_from_cache(
                    message, choose_queue, tried
                ) or await self._choose_queue(message, choose_queue, tried)
                return await self._send_to(queue, message)
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

    async def send_oneway(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None = None
    ) -> None:
        """One way. Raises NotSent, NoRoute."""
        queue = await self._choose_queue(message, choose_queue, set())
        line = await self._heartbeat.connect(queue.address)
        await line.drain()
        now_ms = self._clock.now_ms()
        fields = send_fields(message, queue, group=self._group, now_ms=now_ms)
        line.send_oneway(RequestCode.SEND_MESSAGE_V2, fields, message.body)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """Those that can be written to. Raises NoRoute."""
        route = await self._routes.get_for_writing(topic)
        if not route.writable_queues:
            raise NoRoute(f"no queue of {topic} can be written to")
        return route.writable_queues

    async def _send_to(self, queue: MessageQueue, message: EncodedMessage) -> SendResult:
        clock = self._clock
        began_s = clock.elapsed_s()
        try:
            address = queue.address
            line = self._heartbeat.ready_connection(address) or await self._heartbeat.connect(
                address
            )
            fields = send_fields(message, queue, group=self._group, now_ms=clock.now_ms())
            code = RequestCode.SEND_MESSAGE_V2
            if message.is_batch:
                code = RequestCode.SEND_BATCH_MESSAGE
            reply = await line.call(code, fields, message.body, timeout_s=self._timeout_s)
            result = parse_send_result(reply, queue, message.message_id)
        except (TransportError, RequestRefused) as error:
            if error.retriable:
                self.fault_tolerance.record_failure(queue.broker, clock.elapsed_s())
            raise
        now_s = clock.elapsed_s()
        self.fault_tolerance.record_response(queue.broker, now_s - began_s, now_s)
        return result

    def _choose_from_cache(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None, tried_brokers: set[str]
    ) -> MessageQueue | None:
        """Without asking anybody, if the route is known and nothing has failed yet."""
        if tried_brokers or (route := self._routes.cached(message.topic)) is None:
            return None
        return self._choose_from_route(route, message, choose_queue, tried_brokers)

    async def _choose_queue(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None, tried_brokers: set[str]
    ) -> MessageQueue:
        route = await self._route(message.topic, is_retry=bool(tried_brokers))
        return self._choose_from_route(route, message, choose_queue, tried_brokers)

    def _choose_from_route(
        self,
        route: Route,
        message: EncodedMessage,
        choose_queue: ChooseQueue | None,
        tried_brokers: set[str],
    ) -> MessageQueue:
        queues: Sequence[MessageQueue] = route.writable_queues
        if not queues:
            raise NoRoute(f"no queue of {message.topic} can be written to")
        if choose_queue is not None:
            return choose_queue(queues)
        if message.sharding_key:
            return queue_for_key(message.sharding_key, route)
        fit = self.fault_tolerance.usable_queues(queues, tried_brokers, self._clock.elapsed_s())
        return fit[next(self._round_robin) % len(fit)]

    async def _route(self, topic: str, *, is_retry: bool) -> Route:
        known = self._routes.cached(topic)
        try:
            return await self._routes.get_for_writing(topic, fresh=is_retry)
        except NoRoute:
            raise
        except TransportError:
            if known is None:
                raise
            return known  # no name server answers now; another broker of the old route may


def queue_for_key(sharding_key: str, route: Route) -> MessageQueue:
    """The same as RocketMQ's clients choose by hash, so that both keep one order."""
    queues: Sequence[MessageQueue] = route.writable_queues
    if route.is_template:
        # The first send makes the topic on one broker: already choose as if it were so.
        queues = [queue for queue in queues if queue.broker == queues[0].broker]
    return queues[abs(int(math.fmod(java_hash(sharding_key), len(queues))))]


BATCH_BYTES_MAX: Final = 1 << 20  # of one request; a broker takes 4 MiB unless it is told otherwise
_ITEM_OVERHEAD_BYTES: Final = 22  # what the layout adds to body and properties of each

BatchEntry = tuple[str, BatchItem]  # with the message's id


def check_batch(messages: Sequence[Message]) -> None:
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


def batch_entries(
    messages: Iterable[Message], keys: Iterator[str], extra_properties: Mapping[str, str]
) -> list[BatchEntry]:
    """`more`: properties that all of them get."""
    items = []
    for message in messages:
        message_id = message.properties.get(names.UNIQUE_KEY) or next(keys)
        properties = properties_text(message, message_id, extra_properties).encode()
        items.append((message_id, BatchItem(message.flag, message.body, properties)))
    return items


def split_batch(items: Sequence[BatchEntry], bytes_max: int) -> Iterator[list[BatchEntry]]:
    """In order, as many to a request as fit; a message that is longer than that goes alone."""
    chunk: list[BatchEntry] = []
    filled = 0
    for item in items:
        size = _ITEM_OVERHEAD_BYTES + len(item[1].body) + len(item[1].properties)
        if chunk and filled + size > bytes_max:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += size
    if chunk:
        yield chunk


def encode_batch_message(
    topic: str, chunk: Sequence[BatchEntry], sharding_key: str
) -> EncodedMessage:
    return EncodedMessage(
        topic,
        encode_batch(item for _, item in chunk),
        f"{names.WAIT_STORE_OK}\x01true\x02",
        0,
        0,
        chunk[0][0],
        sharding_key,
        is_batch=True,
    )


def split_result(result: SendResult, message_ids: Sequence[str]) -> list[SendResult]:
    """One for each message, from the answer to all: their places follow each other."""
    places = result.offset_id.split(",")
    places += [""] * (len(message_ids) - len(places))
    return [
        SendResult(result.status, message_id, place, result.queue, result.queue_offset + number)
        for number, (message_id, place) in enumerate(zip(message_ids, places, strict=False))
    ]
