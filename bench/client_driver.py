"""One client under load, in a process of its own and in that client's own environment.

    python client_driver.py CLIENT ADDRESS TOPIC KIND WAY COUNT WARM_UP_S SECONDS

KIND is send or transaction, WAY is threads or flying.
`threads`: so many threads, each waits for its answer. `flying`: so many are under way at once, by
what the client has for that: coroutines, callbacks or futures. The last line of its output is JSON:
how many were done, in how long, for how much processor time of this process. Nothing but the
client and the standard library is imported: the others do not have our package.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

BODY = b"x" * 1024
Work = Callable[[], Any]


class Ours:
    """`escrowmq`; its coroutines run on uvloop, as its blocking client does by itself."""

    def __init__(self, address: str, topic: str) -> None:
        self._address = address
        self._message = importlib.import_module("escrowmq").Message(topic, BODY)

    def blocking(self, kind: str) -> Work:
        producer = importlib.import_module("escrowmq.blocking").Producer(self._address, group="b")
        producer.__enter__()

        def transaction() -> None:
            with producer.transaction(self._message):
                pass

        return transaction if kind == "transaction" else lambda: producer.send(self._message)

    def flying(self, kind: str, load: Load) -> None:
        async def run() -> None:
            async with importlib.import_module("escrowmq").Producer(
                self._address, group="b"
            ) as producer:

                async def transaction() -> None:
                    async with producer.transaction(self._message):
                        pass

                one = transaction if kind == "transaction" else lambda: producer.send(self._message)
                await one()
                load.begin()
                await asyncio.gather(*(self._worker(one, load) for _ in range(load.count)))

        factory = importlib.import_module("uvloop").new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())

    async def _worker(self, one: Callable[[], Awaitable[Any]], load: Load) -> None:
        while load.goes_on():
            await one()
            load.finished()


class Cpp:
    """The two wrappers of RocketMQ's C++ client."""

    name_server = "set_namesrv_addr"

    def __init__(self, address: str, topic: str) -> None:
        self._api = importlib.import_module("rocketmq.client")
        self._address = address
        self._topic = topic

    def _message(self) -> Any:
        message = self._api.Message(self._topic)
        message.set_body(BODY)
        return message

    def _started(self, producer: Any) -> Any:
        getattr(producer, self.name_server)(self._address)
        producer.start()
        return producer

    def blocking(self, kind: str) -> Work:
        producer = self._started(self._api.Producer("bench-cpp"))
        return lambda: producer.send_sync(self._message())

    def flying(self, kind: str, load: Load) -> None:
        producer = self._started(self._api.Producer("bench-cpp"))
        free = threading.Semaphore(load.count)

        def finished(_: Any) -> None:
            load.finished()
            free.release()

        def failed(_: Any) -> None:
            load.failed += 1
            free.release()

        producer.send_sync(self._message())
        load.begin()
        while load.goes_on():
            free.acquire()
            producer.send_async(self._message(), finished, failed)


class CppWithTransactions(Cpp):
    name_server = "set_name_server_address"

    def blocking(self, kind: str) -> Work:
        if kind != "transaction":
            return super().blocking(kind)
        commit = self._api.TransactionStatus.COMMIT
        producer = self._started(self._api.TransactionMQProducer("bench-tx", lambda _: commit))
        return lambda: producer.send_message_in_transaction(
            self._message(), lambda message, argument: commit, None
        )


class Grpc:
    """Apache's official client, over gRPC."""

    def __init__(self, address: str, topic: str) -> None:
        self._api = api = importlib.import_module("rocketmq")
        self._topic = topic

        def check(checker: Any, message: Any) -> Any:
            return api.TransactionResolution.COMMIT

        checker = type("Checker", (api.TransactionChecker,), {"check": check})()
        place = api.ClientConfiguration(address, api.Credentials())
        self._producer = api.Producer(place, (topic,), checker=checker)
        self._producer.startup()

    def _message(self) -> Any:
        message = self._api.Message()
        message.topic, message.body = self._topic, BODY
        return message

    def blocking(self, kind: str) -> Work:
        def transaction() -> None:
            begun = self._producer.begin_transaction()
            self._producer.send(self._message(), begun)
            begun.commit()

        if kind == "transaction":
            return transaction
        return lambda: self._producer.send(self._message())

    def flying(self, kind: str, load: Load) -> None:
        free = threading.Semaphore(load.count)

        def finished(sent: Future[Any]) -> None:
            if sent.exception() is None:
                load.finished()
            else:
                load.failed += 1
            free.release()

        self._producer.send(self._message())
        load.begin()
        while load.goes_on():
            free.acquire()
            self._producer.send_async(self._message()).add_done_callback(finished)


class Load:
    """How much was done between the end of the warm-up and the end."""

    def __init__(self, count: int, warm_up_s: float, seconds: float) -> None:
        self.count = count
        self.failed = 0
        self._done = 0
        self._warm_up_s = warm_up_s
        self._seconds = seconds
        self._from_s = self._until_s = 0.0
        self._began: tuple[float, float, int] | None = None
        self._ended: tuple[float, float, int] | None = None

    def begin(self) -> None:
        """A first one is done: connections and routes are there from here on."""
        self._from_s = time.monotonic() + self._warm_up_s
        self._until_s = self._from_s + self._seconds

    def goes_on(self) -> bool:
        now_s = time.monotonic()
        if self._began is None and now_s >= self._from_s:
            self._began = self._reading()
        if now_s < self._until_s:
            return True
        if self._ended is None:
            self._ended = self._reading()
        return False

    def finished(self) -> None:
        self._done += 1

    def _reading(self) -> tuple[float, float, int]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_utime + used.ru_stime, self._done

    def told(self) -> dict[str, float]:
        assert self._began is not None
        assert self._ended is not None
        seconds, cpu_s, done = (
            after - before for before, after in zip(self._began, self._ended, strict=True)
        )
        return {"done": done, "seconds": seconds, "cpu_s": cpu_s, "failed": self.failed}


def in_threads(one: Work, load: Load) -> None:
    def work() -> None:
        while load.goes_on():
            try:
                one()
            except Exception as error:
                load.failed += 1
                sys.stderr.write(f"{error!r}\n")
            else:
                load.finished()

    threads = [threading.Thread(target=work) for _ in range(load.count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CLIENTS: dict[str, type[Ours | Cpp | Grpc]] = {
    "ours": Ours,
    "cpp-tx": CppWithTransactions,
    "cpp": Cpp,
    "grpc": Grpc,
}


def main() -> None:
    name, address, topic, kind, way, count, warm_up_s, seconds = sys.argv[1:]
    client = CLIENTS[name](address, topic)
    load = Load(int(count), float(warm_up_s), float(seconds))
    if way == "threads":
        one = client.blocking(kind)
        one()
        load.begin()
        in_threads(one, load)
    else:
        client.flying(kind, load)
    sys.stdout.write(json.dumps(load.told()) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some of these libraries do not end well


if __name__ == "__main__":
    main()
