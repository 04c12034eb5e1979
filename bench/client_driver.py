"""One client under load, in its own process and virtual environment.

    python client_driver.py CLIENT ADDRESS TOPIC KIND WAY COUNT WARM_UP_S SECONDS

KIND is send or transaction, WAY is threads or flying.
`threads`: COUNT threads, each waits for its response. `flying`: COUNT requests are in flight, by
the means of the client: coroutines, callbacks or futures. The last line of the output is JSON: the
number of completed requests, the elapsed time and the CPU time of this process. Only the client and
the standard library are imported, because the environments of other clients lack our package.
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
    """`escrowmq`. Its coroutines run on uvloop, as those of its blocking client do."""

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

                operation = (
                    transaction if kind == "transaction" else lambda: producer.send(self._message)
                )
                await operation()
                load.begin()
                await asyncio.gather(*(self._worker(operation, load) for _ in range(load.count)))

        factory = importlib.import_module("uvloop").new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run())

    async def _worker(self, operation: Callable[[], Awaitable[Any]], load: Load) -> None:
        while load.goes_on():
            await operation()
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
    """Count what is completed between the end of the warm-up and the end."""

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
        """Complete a first request, so that connections and routes exist."""
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

    def report(self) -> dict[str, float]:
        assert self._began is not None
        assert self._ended is not None
        seconds, cpu_s, done = (
            after - before for before, after in zip(self._began, self._ended, strict=True)
        )
        return {"done": done, "seconds": seconds, "cpu_s": cpu_s, "failed": self.failed}


def in_threads(operation: Work, load: Load) -> None:
    def work() -> None:
        while load.goes_on():
            try:
                operation()
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
        operation = client.blocking(kind)
        operation()
        load.begin()
        in_threads(operation, load)
    else:
        client.flying(kind, load)
    sys.stdout.write(json.dumps(load.report()) + "\n")
    sys.stdout.flush()
    os._exit(0)  # some of these libraries do not exit cleanly


if __name__ == "__main__":
    main()
