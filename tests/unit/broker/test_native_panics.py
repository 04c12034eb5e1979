"""A panic of the native module, which is a BaseException, costs as little as it can.

The panics are real ones: they are raised by a call of the module that divides by zero.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from types import ModuleType
from typing import Any

import pytest

from escrowmq.broker.turn import Turn
from escrowmq.errors import NativePanic, StoreFailed, panic_as_exception
from escrowmq.native import NativePath, load_native
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.commit_log import AppendResult
from escrowmq.testing.disks import MemoryDisk, PowerCut
from tests.support.path_pair import PathBroker
from tests.support.request_bytes import (
    COMMIT,
    END,
    RequestGenerator,
    end_fields,
    message_properties,
    request_bytes,
)
from tests.support.stores import NOW_MS, open_store, sample

NATIVE = load_native({})
pytestmark = pytest.mark.skipif(NATIVE.module is None, reason=NATIVE.reason)


class PanickingBatch:
    """A batch of the native module. One of its methods panics."""

    def __init__(self, batch: Any, method: str) -> None:
        self._batch, self._method = batch, method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self.panic
        return getattr(self._batch, name)

    def __len__(self) -> int:
        return len(self._batch)

    def panic(self, *_: object) -> None:
        segment_bytes = 0
        self._batch.encode(0, segment_bytes, 0, [])


class PanickingModule(ModuleType):
    """The native module. Once `method` is set, this method of every batch panics."""

    def __init__(self) -> None:
        super().__init__("escrowmq_native")
        self.method = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(NATIVE.module, name)

    def PlainRequests(self, *arguments: Any, **options: Any) -> Any:  # noqa: N802 - a class there
        assert NATIVE.module is not None
        requests = NATIVE.module.PlainRequests(*arguments, **options)
        module = self

        class Requests:
            def read(self, *arguments: Any) -> Any:
                batch = requests.read(*arguments)
                return PanickingBatch(batch, module.method) if module.method else batch

            def __getattr__(self, name: str) -> Any:
                return getattr(requests, name)

        return Requests()


class PanickingBroker(PathBroker):
    def __init__(self, *, is_sync: bool = False) -> None:
        self.module = PanickingModule()
        super().__init__(NativePath(self.module), is_sync=is_sync)
        self.requests = RequestGenerator(Random(1))

    def responses_to(self, *frames: bytes) -> list[dict[str, Any]]:
        """Receive requests in one turn, and return the headers of the responses."""
        self.connections[0].data_received(b"".join(frames))
        self.server.end_turn()
        self.finish_flush(None)
        frames_sent = self.take_responses()[0]
        return sorted((json.loads(frame[8:]) for frame in frames_sent), key=_opaque)

    def plain_frames(self) -> list[bytes]:
        """Return a send, a half, and the end of a half that is stored now."""
        self.responses_to(self.requests.half())
        (half,) = self.broker.transactions.coordinator.halves
        end = end_fields(half.group, half.queue_offset, half.log_offset, COMMIT)
        return [
            self.requests.send(n="broker-a"),
            self.requests.half(),
            request_bytes(END, end, opaque=self.requests.opaque()),
        ]

    @property
    def native_count(self) -> int:
        assert self.broker.native_requests is not None
        return self.broker.native_requests.count


def _opaque(header: dict[str, Any]) -> int:
    opaque: int = header["opaque"]
    return opaque


def codes(responses: list[dict[str, Any]]) -> list[int]:
    return [response["code"] for response in responses]


async def test_requests_are_refused_if_encoding_them_panics() -> None:
    broker = PanickingBroker()
    frames = broker.plain_frames()
    before, count = broker.state(), broker.native_count
    broker.module.method = "encode"
    responses = broker.responses_to(*frames)
    assert codes(responses) == [ResponseCode.SYSTEM_ERROR] * 3
    after = broker.state()
    for name in ("log", "entries", "halves", "totals", "states"):
        assert after[name] == before[name], name
    # Nothing stays reserved: the Python path accepts the same requests.
    assert codes(broker.responses_to(*frames)) == [ResponseCode.SUCCESS] * 3
    assert broker.native_count == count


@pytest.mark.parametrize("method", ["take_keys", "apply"])
async def test_the_store_fails_if_stored_requests_cannot_be_applied(method: str) -> None:
    broker = PanickingBroker()
    frames = broker.plain_frames()
    broker.module.method = method
    assert ResponseCode.SUCCESS not in codes(broker.responses_to(*frames))
    with pytest.raises(StoreFailed, match="panicked"):
        broker.store.append([], now_ms=broker.clock.now_ms())
    # The next start reads from the log what the requests have done.
    started = broker.killed()
    assert len(started.broker.transactions.coordinator.halves) == 1


@pytest.mark.parametrize("is_sync", [False, True])
async def test_requests_are_answered_if_encoding_their_responses_panics(is_sync: bool) -> None:
    broker = PanickingBroker(is_sync=is_sync)
    frames, count = broker.plain_frames(), broker.native_count
    broker.module.method = "responses"
    assert codes(broker.responses_to(*frames)) == [ResponseCode.SYSTEM_ERROR] * 3
    assert len(broker.broker.transactions.coordinator.halves) == 1
    assert broker.native_count == count + 3
    # The records are stored, and the Python path goes on from there.
    repeated = broker.responses_to(*frames[1:], broker.requests.half())
    assert codes(repeated) == [ResponseCode.SUCCESS] * 3
    assert len(broker.broker.transactions.coordinator.halves) == 2
    assert broker.native_count == count + 3


async def test_the_store_fails_if_refused_requests_cannot_be_undone() -> None:
    broker = PanickingBroker()
    frames = broker.plain_frames()
    broker.module.method = "cancel"
    broker.store.has_disk_space = False
    assert len(broker.responses_to(*frames)) == 3
    broker.store.has_disk_space = True
    with pytest.raises(StoreFailed, match="panicked"):
        broker.store.append([], now_ms=broker.clock.now_ms())


async def test_the_store_fails_if_the_python_path_meets_a_panic_in_the_native_table() -> None:
    store = open_store(MemoryDisk())
    turn, done = Turn(store), list[int]()
    panic = native_panic(PanickingBroker())

    def on_stored(_: Sequence[AppendResult]) -> None:
        raise panic

    turn.add_records([sample()], lambda code, _: done.append(code), on_stored=on_stored)
    turn.append_all(NOW_MS)
    assert done == [ResponseCode.SYSTEM_ERROR]
    with pytest.raises(StoreFailed, match="panicked"):
        store.append([sample()], now_ms=NOW_MS)


async def test_a_panic_while_reading_costs_no_request() -> None:
    """The panic comes when requests before it have reserved keys and halves."""
    broker = PanickingBroker()
    frames, count = broker.plain_frames(), broker.native_count
    panic = native_panic(broker)

    def immunity_ms(topic: str, group: str) -> int:
        # A panic that comes back into the native module goes on there.
        if group == "unlucky":
            raise panic
        return 6_000

    # There is no public way to make reading panic.
    requests = broker.broker.native_requests._requests  # type: ignore[union-attr]
    limits = dict.fromkeys(
        ("message_bytes", "record_bytes", "half_bytes", "open_max", "open_bytes"), 1 << 20
    )
    requests.configure(
        **limits, group_open_max=1 << 20, group_open_bytes=1 << 20, immunity_ms=immunity_ms
    )
    properties = message_properties(TRAN_MSG="true", UNIQ_KEY="LAST", PGROUP="unlucky")
    responses = broker.responses_to(*frames, broker.requests.half(i=properties))
    assert codes(responses) == [ResponseCode.SUCCESS] * 4
    assert len(broker.broker.transactions.coordinator.halves) == 2
    assert broker.native_count == count


def native_panic(broker: PanickingBroker) -> BaseException:
    batch = broker.broker.native_requests._requests.read([], 0, 1, None)  # type: ignore[union-attr]
    with pytest.raises(BaseException, match="divisor of zero") as caught:
        PanickingBatch(batch, "encode").panic()
    assert not isinstance(caught.value, Exception)
    return caught.value


async def test_what_ends_the_process_is_no_panic() -> None:
    assert isinstance(panic_as_exception(native_panic(PanickingBroker())), NativePanic)
    error = ValueError("a bug")
    assert panic_as_exception(error) is error
    for ending in (KeyboardInterrupt(), SystemExit(), PowerCut()):
        with pytest.raises(type(ending)):
            panic_as_exception(ending)
