"""Send a message: encode it, choose a queue, send it, and try again where that may help.

    Message ──MessageEncoder──> EncodedMessage ──MessageSender──> SEND_MESSAGE_V2 ──> SendResult
                                      ▲               │
    Messages ──split_batch────────────┘               LatencyFaultTolerance: which brokers to avoid

A message is encoded once and keeps its unique key in every attempt, so that an EscrowMQ broker
recognises a repeated one.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from escrowmq.client.heartbeat import ProducerHeartbeat
from escrowmq.client.messages import (
    Message,
    MessageQueue,
    SendResult,
    SendStatus,
    check_is_message,
)
from escrowmq.client.routes import DEFAULT_QUEUE_COUNT, Routes
from escrowmq.client.topic_route import Route
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
from escrowmq.message.batch import BATCH_MESSAGES_MAX, BatchItem, encode_batch
from escrowmq.message.compression import compress_body
from escrowmq.message.keys import java_hash
from escrowmq.message.names import (
    BROKER_ONLY_TOPICS,
    SHARDING_KEY,
    TEMPLATE_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    topic_name_error,
)
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.connection import Reply, parse_int_field
from escrowmq.remoting.requests import Body

log = logging.getLogger(__name__)

# Chooses one of the writable queues of a topic. Called again for each attempt.
ChooseQueue = Callable[[Sequence[MessageQueue]], MessageQueue]


class MessageSender:
    """Sends encoded messages of one producer group.

    `timeout_s` is the timeout of one attempt, `retries` the number of further attempts. Queues
    are used in turn, starting at `first_index`, which should be random.
    """

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
        """Send a message, on another broker if one fails.

        Raises TransportError or RequestRefused. It is OutcomeUnknown if any attempt may have
        succeeded, whatever the last one ended with.
        """
        tried_brokers: set[str] = set()
        uncertain: EscrowError | None = None
        for attempt in itertools.count():
            queue: MessageQueue | None = None
            try:
                queue = self._choose_from_cache(
                    message, choose_queue, tried_brokers
                ) or await self._choose_queue(message, choose_queue, tried_brokers)
                return await self._send_to(queue, message)
            except (TransportError, RequestRefused) as error:
                if error.may_have_happened:
                    uncertain = error
                if queue is None or attempt >= self._retries or not error.retriable:
                    if uncertain is None or uncertain is error:
                        raise
                    # An earlier attempt may have stored the message. Raising only the last error
                    # would tell the caller that it was not stored.
                    raise OutcomeUnknown(f"{error}; an earlier attempt: {uncertain}") from error
                tried_brokers.add(queue.broker)
                log.info("send failed, retrying broker=%s: %s", queue.broker, error)
        raise AssertionError("the loop ends with a result or an error")

    async def send_oneway(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None = None
    ) -> None:
        """Send a message without a response. Raises NotSent or NoRoute."""
        queue = await self._choose_queue(message, choose_queue, set())
        connection = await self._heartbeat.connect(self._routes.master_addresses[queue.broker])
        await connection.drain()
        now_ms = self._clock.now_ms()
        fields = send_fields(message, queue, group=self._group, now_ms=now_ms)
        connection.send_oneway(RequestCode.SEND_MESSAGE_V2, fields, message.body)

    async def writable_route(self, topic: str) -> Route:
        """Return the route of a topic that has writable queues. Raises NoRoute."""
        route = await self._routes.get_for_writing(topic)
        if not route.writable_queues:
            raise NoRoute(f"topic {topic} has no writable queue")
        return route

    async def _send_to(self, queue: MessageQueue, message: EncodedMessage) -> SendResult:
        clock = self._clock
        started_s = clock.elapsed_s()
        try:
            address = self._routes.master_addresses[queue.broker]
            connection = self._heartbeat.ready_connection(address) or await self._heartbeat.connect(
                address
            )
            fields = send_fields(message, queue, group=self._group, now_ms=clock.now_ms())
            code = RequestCode.SEND_MESSAGE_V2
            if message.is_batch:
                code = RequestCode.SEND_BATCH_MESSAGE
            reply = await connection.call(code, fields, message.body, timeout_s=self._timeout_s)
            result = parse_send_result(reply, queue, message.message_id)
        except (TransportError, RequestRefused) as error:
            if error.retriable:
                self.fault_tolerance.record_failure(queue.broker, clock.elapsed_s())
            raise
        now_s = clock.elapsed_s()
        self.fault_tolerance.record_response(queue.broker, now_s - started_s, now_s)
        return result

    def _choose_from_cache(
        self, message: EncodedMessage, choose_queue: ChooseQueue | None, tried_brokers: set[str]
    ) -> MessageQueue | None:
        """Choose a queue without waiting; None if the route is not cached or an attempt failed."""
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
            raise NoRoute(f"topic {message.topic} has no writable queue")
        if choose_queue is not None:
            return choose_queue(queues)
        if message.sharding_key:
            return queue_for_key(message.sharding_key, route)
        usable = self.fault_tolerance.usable_queues(queues, tried_brokers, self._clock.elapsed_s())
        return usable[next(self._round_robin) % len(usable)]

    async def _route(self, topic: str, *, is_retry: bool) -> Route:
        cached = self._routes.cached(topic)
        try:
            return await self._routes.get_for_writing(topic, fresh=is_retry)
        except NoRoute:
            raise
        except TransportError:
            if cached is None:
                raise
            return cached  # no name server responds; another broker of the old route may do


def queue_for_key(sharding_key: str, route: Route) -> MessageQueue:
    """Choose a queue by hash, the same one as RocketMQ's clients, so that messages of both with
    the same key keep one order."""
    queues: Sequence[MessageQueue] = route.writable_queues
    if route.is_template:
        # The first send creates the topic on one broker only. Choose among its queues already
        # now: the messages of a key must not move when the real route becomes known.
        queues = [queue for queue in queues if queue.broker == queues[0].broker]
    # fmod keeps the sign of the dividend, like Java's remainder.
    return queues[abs(int(math.fmod(java_hash(sharding_key), len(queues))))]


# --- one message on the wire ---------------------------------------------------------------------

DEFAULT_COMPRESS_ABOVE_BYTES: Final = 4096
DEFAULT_BODY_BYTES_MAX: Final = 4 << 20  # RocketMQ's maxMessageSize of clients and brokers
COMPRESSION_FLAGS: Final = {
    "zlib": sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSION_ZSTD,
}


class EncodedMessage(NamedTuple):
    """A message, or a batch of messages, ready to send."""

    topic: str  # with its namespace
    body: Body
    properties: str
    sys_flag: int
    flag: int
    message_id: str
    sharding_key: str = ""
    is_batch: bool = False


class MessageEncoder:
    """Checks and encodes messages, compressing bodies longer than `compress_above_bytes`.

    None compresses none. `body_bytes_max` is the limit of a body before it is compressed. Raises
    ValueError for an unknown compression or an impossible limit.
    """

    def __init__(
        self,
        *,
        compress_above_bytes: int | None = DEFAULT_COMPRESS_ABOVE_BYTES,
        compression: str = "zlib",
        body_bytes_max: int = DEFAULT_BODY_BYTES_MAX,
    ) -> None:
        if compression not in COMPRESSION_FLAGS:
            raise ValueError(
                f"compression must be one of {', '.join(COMPRESSION_FLAGS)}, not {compression!r}"
            )
        if compress_above_bytes is not None and compress_above_bytes < 0:
            raise ValueError(
                "compress_above_bytes must be a number of bytes or None, "
                f"not {compress_above_bytes}"
            )
        if body_bytes_max < 1:
            raise ValueError(f"body_bytes_max must be at least 1, not {body_bytes_max}")
        self._compress_above_bytes = compress_above_bytes
        self._compression_flag = COMPRESSION_FLAGS[compression]
        self._body_bytes_max = body_bytes_max

    def check(self, message: Message, topic: str) -> None:
        """Raise LocalProtocolError for a message that RocketMQ's clients refuse to send.

        `topic` is the message's topic with its namespace.
        """
        if error := topic_name_error(topic):
            raise LocalProtocolError(error)
        if topic in BROKER_ONLY_TOPICS:
            raise LocalProtocolError(f"{topic} is a system topic, which only the broker writes")
        if not message.body:
            raise LocalProtocolError(
                f"the body of a message to topic {topic} is empty: it needs at least one byte"
            )
        if len(message.body) > self._body_bytes_max:
            raise LocalProtocolError(
                f"the body of a message to topic {topic} has {len(message.body)} bytes, "
                f"the producer's limit is {self._body_bytes_max} (body_bytes_max)"
            )

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
        """Check and encode a message.

        `topic` includes the namespace, `extra_properties` replace those of the message,
        `with_delay=False` leaves out its delay. Raises LocalProtocolError if it is invalid.
        """
        self.check(message, topic)
        body = message.body
        if self._compress_above_bytes is not None and len(body) > self._compress_above_bytes:
            compressed = compress_body(body, self._compression_flag)
            if len(compressed) < len(body):
                body = compressed
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
    """Encode the properties of a message, including those for its keys, tags and delay.

    Raises LocalProtocolError for an empty name or value, or one that contains a separator.
    """
    properties = {names.UNIQUE_KEY: message_id, names.WAIT_STORE_OK: "true"}
    if message.properties:
        properties |= message.properties
    keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
    if keys:
        properties[names.KEYS] = keys
    if message.tags:
        properties[names.TAGS] = message.tags
    if message.sharding_key:
        properties[SHARDING_KEY] = message.sharding_key
    if with_delay and message.is_delayed:
        properties |= _delay_properties(message)
    if extra_properties:
        properties |= extra_properties
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items()])
    # Check the whole text at once, which is faster than checking each name and value: each
    # separator must occur exactly once for each property, and never next to another one.
    if text.count("\x01") != len(properties) or text.count("\x02") != len(properties):
        raise LocalProtocolError("a property contains a separator (0x01 or 0x02)")
    if text[0] == "\x01" or "\x01\x02" in text or "\x02\x01" in text:
        raise LocalProtocolError(f"a property has no name or no value: {message.properties}")
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
    """Return the fields of SEND_MESSAGE_V2 and SEND_BATCH_MESSAGE by their short names.

    This is the header SendMessageV2 (remoting/headers.py) written out by hand, because it is
    encoded for every message.
    """
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
    """Return the result of a send.

    Raises RequestRefused if the message was not stored, and BrokenResponse if it may be stored but
    the response does not say where.
    """
    status = _STATUSES.get(reply.code)
    if status is None:
        raise RequestRefused(reply.code, reply.remark or f"code {reply.code}")
    fields = reply.ext_fields
    queue_id = parse_int_field(fields, "queueId", queue.queue_id)
    return SendResult(
        status,
        message_id,
        fields.get("msgId", ""),
        queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id),
        parse_int_field(fields, "queueOffset", -1),
        fields.get("transactionId", ""),
    )


# --- batches -------------------------------------------------------------------------------------

BATCH_BYTES_MAX: Final = 1 << 20  # of one request; brokers accept 4 MiB by default
_ITEM_OVERHEAD_BYTES: Final = 22  # added to the body and properties of each message

BatchEntry = tuple[str, BatchItem]  # message id, encoded message


def check_batch(messages: Sequence[Message]) -> None:
    """Raise LocalProtocolError if these messages cannot be one batch."""
    if not messages:
        raise LocalProtocolError("a batch needs at least one message")
    for message in messages:
        check_is_message(message)
    first = messages[0]
    for message in messages:
        if message.topic != first.topic:
            raise LocalProtocolError(
                f"the messages of a batch must have one topic, got {first.topic} and "
                f"{message.topic}: send a batch for each"
            )
        if message.sharding_key != first.sharding_key:
            raise LocalProtocolError(
                "the messages of a batch must have one sharding key, because a batch goes to one "
                "queue: send a batch for each"
            )
        if message.is_delayed:
            raise LocalProtocolError("a batch cannot contain a delayed message: send it alone")
        if names.TRANSACTIONAL in message.properties:
            raise LocalProtocolError(
                "a batch cannot contain a transactional message: use producer.transaction(), "
                "which decides any number of messages together"
            )


def batch_entries(
    messages: Iterable[Message], keys: Iterator[str], extra_properties: Mapping[str, str]
) -> list[BatchEntry]:
    """Encode the messages of a batch. All of them get `extra_properties`."""
    entries = []
    for message in messages:
        message_id = message.properties.get(names.UNIQUE_KEY) or next(keys)
        properties = properties_text(message, message_id, extra_properties).encode()
        entries.append((message_id, BatchItem(message.flag, message.body, properties)))
    return entries


def split_batch(entries: Sequence[BatchEntry], bytes_max: int) -> Iterator[list[BatchEntry]]:
    """Split a batch into requests of at most `bytes_max`, in order. A longer message goes alone.

    Brokers accept a limited number of messages in one request, too.
    """
    chunk: list[BatchEntry] = []
    chunk_bytes = 0
    for entry in entries:
        size = _ITEM_OVERHEAD_BYTES + len(entry[1].body) + len(entry[1].properties)
        if chunk and (chunk_bytes + size > bytes_max or len(chunk) >= BATCH_MESSAGES_MAX):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(entry)
        chunk_bytes += size
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
    """Return the result of each message of a batch; their queue offsets are consecutive."""
    offset_ids = result.offset_id.split(",")
    offset_ids += [""] * (len(message_ids) - len(offset_ids))
    return [
        SendResult(result.status, message_id, offset_id, result.queue, result.queue_offset + number)
        for number, (message_id, offset_id) in enumerate(zip(message_ids, offset_ids, strict=False))
    ]


# --- slow and failed brokers ---------------------------------------------------------------------

# (latency, time to avoid the broker) in seconds. The steps are RocketMQ's.
_AVOIDANCE_STEPS: Final = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
SLOW_LATENCY_S: Final = _AVOIDANCE_STEPS[-1][0]
FAILURE_LATENCY_S: Final = 10.0  # a failure counts as a response that took so long


def avoidance_s(latency_s: float) -> float:
    """Return how long to avoid a broker after a response that took `latency_s`."""
    return next((avoided_s for slow_s, avoided_s in _AVOIDANCE_STEPS if latency_s >= slow_s), 0.0)


class LatencyFaultTolerance:
    """Avoids brokers that respond slowly or fail, the slower the longer.

    Avoiding is a preference: if all brokers are avoided, the one whose time ends first is used.
    """

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
        """Return the queues to choose from: of brokers that are not avoided and were not tried
        for this message, as far as there are any."""
        if not tried_brokers and not self._avoided_until_s:
            return queues
        untried = [queue for queue in queues if queue.broker not in tried_brokers] or queues
        usable = [queue for queue in untried if not self.is_avoided(queue.broker, now_s)]
        if usable:
            return usable
        first_broker = min(
            (queue.broker for queue in untried), key=lambda name: self._avoided_until_s[name]
        )
        return [queue for queue in untried if queue.broker == first_broker]
