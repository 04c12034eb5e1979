"""Get a message stored: to a queue that works, and again if that may help."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence

from escrowmq.client.faults import Faults
from escrowmq.client.messages import Queue, SendResult
from escrowmq.client.packing import Packed
from escrowmq.client.presence import Presence
from escrowmq.client.routes import Route, Routes
from escrowmq.client.sending import result_of, send_fields
from escrowmq.clock import Clock
from escrowmq.errors import (
    EscrowError,
    NoRoute,
    OutcomeUnknown,
    RequestRefused,
    TransportError,
)
from escrowmq.message.javahash import java_hash
from escrowmq.wire.codes import RequestCode

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
