"""Packed halves: many messages are parked as one half and delivered one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from escrowmq.message import names
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.message.properties import decode_properties
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Request
from tests.support.broker_requests import send_request
from tests.support.escrows import (
    COMMIT,
    EscrowBench,
    decide_batch_request,
    end_request,
    half_request,
    position_of,
)

ILLEGAL = 13
ATTEMPT = "ESCROW_WRITER\x01w\x02ESCROW_BATCH\x010\x02ESCROW_ATTEMPT\x01a\x02ESCROW_FENCE\x011\x02"


def properties(key: str, extra: str = "") -> bytes:
    return f"UNIQ_KEY\x01{key}\x02{extra}".encode()


def packed_request(
    bodies: Sequence[bytes],
    *,
    key: str = "pack",
    item_properties: Sequence[bytes] | None = None,
    outer: str = ATTEMPT,
    half: str = "TRAN_MSG\x01true\x02",
) -> Request[SendMessage]:
    """Return the send of a packed half. `outer` and `half` are properties of the half itself."""
    item_properties = item_properties or [
        properties(f"{key}-{number}") for number in range(len(bodies))
    ]
    pairs = zip(bodies, item_properties, strict=True)
    items = [BatchItem(0, body, encoded) for body, encoded in pairs]
    return send_request(
        body=encode_batch(items),
        producer_group="p",
        topic="T",
        properties=f"{half}PGROUP\x01p\x02UNIQ_KEY\x01{key}\x02{outer}",
        sys_flag=4,
        batch=True,
    )


def decide(bench: EscrowBench, count: int) -> int:
    """Decide batch 0 for attempt a with this number of halves, and return the response code."""
    return bench.request(decide_batch_request(0, 1, [("a", count)])).code


def test_packed_messages_are_delivered_one_by_one_and_in_order() -> None:
    bench = EscrowBench()
    bench.register()
    for key, bodies in (("p", [b"1", b"2"]), ("q", [b"3"])):
        assert bench.request(packed_request(bodies, key=key)).code == 0
    assert bench.bodies() == []
    assert decide(bench, 2) == 0
    assert bench.bodies() == [b"1", b"2", b"3"]
    first = decode_properties(bench.messages()[0].properties)
    assert first["UNIQ_KEY"] == "p-0"
    assert first["CLUSTER"] == "C"
    assert not [name for name in first if name.startswith(("ESCROW_", "TRAN_", "REAL_"))]


def test_a_repeated_send_of_a_packed_half_is_the_same_half() -> None:
    bench = EscrowBench()
    bench.register()
    first = position_of(bench.request(packed_request([b"1", b"2"])))
    assert position_of(bench.request(packed_request([b"1", b"2"]))) == first
    assert decide(bench, 1) == 0
    assert bench.bodies() == [b"1", b"2"]


def test_a_crash_during_the_delivery_leaves_each_message_once() -> None:
    bodies = [b"%d" % number * 50 for number in range(5)]
    bench = EscrowBench()
    bench.register()
    delayed = properties("pack-2", "DELAY\x011\x02")
    item_properties = [properties(f"pack-{number}") for number in range(5)]
    item_properties[2] = delayed
    bench.request(packed_request(bodies, item_properties=item_properties))
    bench.request(packed_request([b"other"], key="other"))
    before = bench.store.end
    assert decide(bench, 2) == 0
    expected = [*bodies[:2], *bodies[3:], b"other"]
    delivered_counts = set()
    for cut in range(before, bench.store.end + 1, 30):
        restarted = bench.truncated(cut)
        delivered = restarted.bodies()
        delivered_counts.add(len(delivered))
        if delivered:
            assert delivered == expected, cut
            assert restarted.bodies("SCHEDULE_TOPIC_XXXX", 0) == [bodies[2]], cut
            assert len(restarted.coordinator.halves) == 0
        else:
            assert len(restarted.coordinator.halves) == 2
            assert decide(restarted, 2) == 0
            assert restarted.bodies() == expected
    assert delivered_counts == {0, len(expected)}  # both cases occurred


def test_a_packed_half_can_be_moved() -> None:
    bench = EscrowBench()
    bench.register()
    bench.request(packed_request([b"1", b"2"]))
    [half] = bench.coordinator.halves
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()
    restarted = bench.killed(with_snapshot=False)
    assert decide(restarted, 1) == 0
    assert restarted.bodies() == [b"1", b"2"]


def test_a_packed_half_can_be_committed_by_an_end() -> None:
    bench = EscrowBench()
    position = position_of(bench.request(packed_request([b"1", b"2"])))
    assert bench.request(end_request(position, COMMIT)).code == 0
    assert bench.bodies() == [b"1", b"2"]


@pytest.mark.parametrize(
    "request_",
    [
        packed_request([b"1", b"2"], item_properties=[properties("k"), properties("k")]),
        packed_request([b"1"], item_properties=[b""]),
        packed_request([b"1"], item_properties=[b"KEYS\x01k\x02"]),
        packed_request([b"1"], item_properties=[properties("k", "TRAN_MSG\x01true\x02")]),
        packed_request(
            [b"1"], item_properties=[properties("k", "TIMER_DELAY_MS\x01999999999999\x02")]
        ),
        packed_request([b"1"], item_properties=[b"UNIQ_KEY\x01k"]),
        packed_request([b"1"], item_properties=[properties("k", "A\x01\0\x02")]),
        packed_request([b"1"], half=""),
        packed_request([]),
    ],
    ids=[
        *("same key", "no properties", "no key", "half in a half", "too long a delay"),
        *("no separator", "zero byte", "no half", "empty"),
    ],
)
def test_messages_that_could_not_be_delivered_are_refused_at_once(
    request_: Request[SendMessage],
) -> None:
    bench = EscrowBench()
    bench.register()
    assert bench.request(request_).code != 0
    assert len(bench.coordinator.halves) == 0


def test_a_client_cannot_mark_a_half_as_packed() -> None:
    bench = EscrowBench()
    position = bench.park("k", body=b"not a batch", ESCROW_PACKED="2")
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"not a batch"]
    assert bench.request(half_request("k2", ESCROW_PACKED="7", topic="T")).code == 0
    assert bench.store.max_offset(names.HALF_TOPIC, 0) == 2
