"""Consumers for threads and frameworks; `escrowmq.blocking` is where to import them from."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from escrowmq.client import consumer as consumers
from escrowmq.client import lite, puller
from escrowmq.client.calls import Pulled
from escrowmq.client.filters import Subscribed, Wanted
from escrowmq.client.handlers import Handler
from escrowmq.client.loopthread import Blocking, made
from escrowmq.client.messages import Queue, ReceivedMessage
from escrowmq.client.places import Moment

C = TypeVar("C", bound="consumers.Consumer | lite.LiteConsumer | puller.PullConsumer")


class _Consumer(Blocking, Generic[C]):
    """What all have: an inner one, that lives between `with` and `close`."""

    def __init__(self, make: Callable[[], C]) -> None:
        super().__init__()
        self._inner: C = self._run(made(make))

    def __enter__(self) -> Self:
        self._run(self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._inner.__aexit__(kind, error, trace))

    def close(self) -> None:
        self._run(self._inner.close())


class Consumer(_Consumer[consumers.Consumer]):
    """See `escrowmq.Consumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscribed | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            lambda: consumers.Consumer(servers, group=group, subscribe=subscribe, **more)
        )

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Ends when another thread closes it."""
        while (message := self._run(self._inner.next_message())) is not None:
            yield message

    def receive(self) -> ReceivedMessage:
        return self._run(self._inner.receive())

    def later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        self._run(self._inner.later(message, delay_level=delay_level))

    def reply(
        self,
        message: ReceivedMessage,
        body: bytes,
        *,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        self._run(self._inner.reply(message, body, properties=properties))

    def on(self, topic: str, wanted: Wanted = "*") -> Callable[[Handler], Handler]:
        """The function runs in a thread."""

        def register(handler: Handler) -> Handler:
            return self._run(made(lambda: self._inner.on(topic, wanted)(handler)))

        return register

    def run(self) -> None:
        """Until SIGTERM or SIGINT, if this is the main thread; until `stop` or `close` anywhere."""
        with _on_signals(self.stop):
            self._run(self._inner.run())

    def stop(self) -> None:
        """From any thread, a handler's too: `run` ends when what is in hand is done."""
        self._loop.call_soon_threadsafe(self._inner.stop)

    @property
    def queues(self) -> list[Queue]:
        return self._run(made(lambda: self._inner.queues))


class LiteConsumer(_Consumer[lite.LiteConsumer]):
    """See `escrowmq.LiteConsumer`."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        subscribe: Subscribed | None = None,
        **more: Any,
    ) -> None:
        super().__init__(
            lambda: lite.LiteConsumer(servers, group=group, subscribe=subscribe, **more)
        )

    def queues(self, topic: str) -> list[Queue]:
        return self._run(self._inner.queues(topic))

    def assign(self, queues: Sequence[Queue], wanted: Wanted = "*") -> None:
        self._run(self._inner.assign(queues, wanted))

    @property
    def assigned(self) -> list[Queue]:
        return self._run(made(lambda: self._inner.assigned))

    def poll(self, timeout_s: float = 5.0, *, most: int = lite.POLLED) -> list[ReceivedMessage]:
        return self._run(self._inner.poll(timeout_s, most=most))

    def commit(self) -> None:
        self._run(self._inner.commit())

    def committed(self, queue: Queue) -> int | None:
        return self._run(self._inner.committed(queue))

    def seek(self, queue: Queue, offset: int) -> None:
        self._run(self._inner.seek(queue, offset))

    def seek_to_begin(self, queue: Queue) -> None:
        self._run(self._inner.seek_to_begin(queue))

    def seek_to_end(self, queue: Queue) -> None:
        self._run(self._inner.seek_to_end(queue))

    def seek_to_time(self, queue: Queue, moment: Moment) -> None:
        self._run(self._inner.seek_to_time(queue, moment))

    def pause(self, *queues: Queue) -> None:
        self._run(made(lambda: self._inner.pause(*queues)))

    def resume(self, *queues: Queue) -> None:
        self._run(made(lambda: self._inner.resume(*queues)))


class PullConsumer(_Consumer[puller.PullConsumer]):
    """See `escrowmq.PullConsumer`."""

    def __init__(self, servers: str | Sequence[str], *, group: str, **more: Any) -> None:
        super().__init__(lambda: puller.PullConsumer(servers, group=group, **more))

    def queues(self, topic: str) -> list[Queue]:
        return self._run(self._inner.queues(topic))

    def assigned(self, topic: str) -> list[Queue]:
        return self._run(self._inner.assigned(topic))

    def pull(
        self,
        queue: Queue,
        offset: int,
        wanted: Wanted = "*",
        *,
        most: int = 32,
        wait_s: float = 0.0,
    ) -> Pulled:
        return self._run(self._inner.pull(queue, offset, wanted, most=most, wait_s=wait_s))

    def committed(self, queue: Queue) -> int | None:
        return self._run(self._inner.committed(queue))

    def commit(self, queue: Queue, offset: int) -> None:
        self._run(self._inner.commit(queue, offset))

    def earliest(self, queue: Queue) -> int:
        return self._run(self._inner.earliest(queue))

    def latest(self, queue: Queue) -> int:
        return self._run(self._inner.latest(queue))

    def at(self, queue: Queue, moment: Moment) -> int:
        return self._run(self._inner.at(queue, moment))


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: stop())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
