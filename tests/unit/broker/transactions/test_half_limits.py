"""Halves of sizes around every limit: one that is accepted can always be committed.

An accepted half can be checked, stranded, resumed, moved out of expiring segments and committed,
because the broker reserves space for everything that it may have to add. A half whose check fails
with an unexpected error stops neither the broker nor the checks of other halves.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.config import BrokerConfig
from escrowmq.escrow.records import HALF_PROPERTIES_BYTES_MAX, UNIQUE_KEY_BYTES_MAX
from escrowmq.message import names
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import CRC_PROPERTY_BYTES_MAX, PROPERTIES_BYTES_MAX, NewRecord
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header, ResumeTransaction
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, new_request, send_request
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    SETTINGS,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    half_request,
    position_of,
    sent_checks,
)

MOVES = 20


def send_half(
    bench: EscrowBench,
    key: str,
    properties_bytes: int,
    body_bytes: int,
    topic: str = "T",
    **special: str,
) -> Response:
    """Send a half whose properties have this many bytes, as the client encodes them."""
    properties = {"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": key, **special}
    missing = properties_bytes - len(encode_properties(properties)) - len("fill\x01\x02")
    if missing > 0:
        properties["fill"] = "f" * missing
    text = encode_properties(properties).decode()
    return bench.request(send_request(topic, b"b" * body_bytes, properties=text, sys_flag=4))


def added_bytes(key: str, topic: str) -> int:
    """Return how many bytes of properties the broker adds when it parks a half."""
    bench = EscrowBench()
    assert send_half(bench, key, 5_000, 0, topic).code == 0
    return len(bench.messages(names.HALF_TOPIC)[0].properties) - 5_000


def check_until_stranded(bench: EscrowBench, position: HalfPosition) -> None:
    for _ in range(ESCROW.checks_max):
        bench.tick(after_ms=ESCROW.check_interval_ms)
        checks = sent_checks(bench.channel)
        assert [checked for _, checked in checks] == [position]
    bench.tick(after_ms=ESCROW.check_interval_ms)
    assert bench.state(position) == "stranded"
    half = bench.coordinator.find_open(*position)
    assert half is not None
    (stranded,) = bench.messages(names.STRANDED_TOPIC)
    assert decode_properties(stranded.properties)[names.REASON] == half.reason


def resume(bench: EscrowBench, key: str) -> None:
    fields = ResumeTransaction(transaction_id=key, operator="tests", reason="try again")
    assert bench.request(new_request(RequestCode.RESUME_TRANSACTION, fields)).code == 0
    bench.tick()
    assert len(sent_checks(bench.channel)) == 1


def move_often(bench: EscrowBench) -> None:
    for _ in range(MOVES):
        bench.broker.transactions.move_halves_below(bench.store.end, bench.now_ms)
        bench.turn()
        half = bench.coordinator.halves.oldest()
        assert half is not None
        assert not half.is_being_decided
        assert half.previous_offsets[0] == 0


@settings(max_examples=60, deadline=None)
@given(
    key_bytes=st.one_of(
        st.integers(1, 40), st.integers(UNIQUE_KEY_BYTES_MAX - 1, UNIQUE_KEY_BYTES_MAX)
    ),
    topic=st.sampled_from(["T", "t" * 127]),
    stored_limit=st.sampled_from([4_096, HALF_PROPERTIES_BYTES_MAX, PROPERTIES_BYTES_MAX]),
    near=st.integers(-40, 40),
    body_bytes=st.sampled_from([0, 10, 5_000]),
    special=st.sampled_from([{}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "1"}]),
)
def test_an_accepted_half_survives_everything_until_its_commit(
    key_bytes: int,
    topic: str,
    stored_limit: int,
    near: int,
    body_bytes: int,
    special: dict[str, str],
) -> None:
    bench, key = EscrowBench(), "k" * key_bytes
    properties_bytes = stored_limit + near - added_bytes(key, topic)
    response = send_half(bench, key, properties_bytes, body_bytes, topic, **special)
    if response.code:
        assert response.code == 13, response.remark
        assert stored_limit + near > HALF_PROPERTIES_BYTES_MAX
        assert bench.messages(names.HALF_TOPIC) == []
        return
    position = position_of(response)
    check_until_stranded(bench, position)
    resume(bench, key)
    move_often(bench)
    bench = bench.killed(with_snapshot=False)
    half = bench.coordinator.halves.oldest()
    assert half is not None
    assert half.checks == 1, "the last copy has the number of checks"
    assert bench.end(position, COMMIT).code == 0, "the first position still names the half"
    bench.tick(after_ms=2_000)
    assert bench.bodies(topic) == [b"b" * body_bytes]


@pytest.mark.parametrize("segment_bytes", [1 << 14, 1 << 16])
def test_an_accepted_half_can_be_copied_into_a_segment_when_it_is_stranded(
    segment_bytes: int,
) -> None:
    store_settings = replace(SETTINGS, segment_bytes=segment_bytes)
    accepted_count = 0
    for body_bytes in range(segment_bytes - 3_000, segment_bytes, 100):
        bench = EscrowBench(settings=store_settings)
        response = send_half(bench, "k", 0, body_bytes)
        if response.code:
            assert response.code == 13
            assert "mapedFileSizeCommitLog" in response.remark
            continue
        accepted_count += 1
        check_until_stranded(bench, position_of(response))
    assert 0 < accepted_count < 30


def test_the_refusal_of_a_half_with_a_long_key_names_the_limit() -> None:
    bench = EscrowBench()
    for properties_bytes in (0, 5_000):  # the fast path and the general one
        response = send_half(bench, "k" * 256, properties_bytes, 1)
        assert response.code == 13
        assert "UNIQ_KEY" in response.remark
        assert "the limit is 255" in response.remark


def test_a_half_is_committed_after_the_size_limit_of_messages_was_lowered() -> None:
    bench = EscrowBench()
    position = bench.park("k", body=b"b" * 2_000)
    lower = replace(bench.settings, message_bytes_max=100)
    bench.store.change_config(lower)
    bench.broker.send_processor.change_config(BrokerConfig(), lower.message_bytes_max)
    assert bench.request(half_request("second", body=b"b" * 2_000)).code == 13
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"b" * 2_000]


# --- halves that RocketMQ stored without reserved space ------------------------------------------


@pytest.mark.parametrize("free_bytes", [0, 1, 20, 40, 200])
def test_a_full_half_of_rocketmq_is_checked_stranded_resumed_and_committed(free_bytes: int) -> None:
    bench = EscrowBench()
    properties = {
        "REAL_TOPIC": "T",
        "REAL_QID": "0",
        "PGROUP": "p",
        "UNIQ_KEY": "k",
        "TRAN_MSG": "true",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }
    # As many bytes as the store can write. RocketMQ could have used those of the CRC as well.
    bytes_max = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX - free_bytes
    missing = bytes_max - len(encode_properties(properties)) - len("fill\x01\x02")
    encoded = encode_properties({"fill": "f" * missing, **properties})
    record = NewRecord(names.HALF_TOPIC, 0, b"body", encoded, born_ms=bench.now_ms)
    bench.store.append([record], now_ms=bench.now_ms)
    bench = bench.killed()
    bench.heartbeat(bench.channel, "p")
    half = bench.coordinator.halves.oldest()
    assert half is not None
    position = HalfPosition(half.queue_offset, half.log_offset)
    sent_checks(bench.channel)
    for _ in range(ESCROW.checks_max + 1):
        bench.tick(after_ms=ESCROW.check_interval_ms)
    assert bench.state(position) == "stranded"
    (stranded,) = bench.messages(names.STRANDED_TOPIC)
    assert decode_properties(stranded.properties)["fill"] == "f" * missing
    sent_checks(bench.channel)
    resume(bench, "k")
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"body"]


# --- unexpected errors ---------------------------------------------------------------------------


class BrokenChannel(FakeChannel):
    """A channel that raises an unexpected error for the check of one half."""

    def send_oneway(self, code: int, fields: Header, body: object = b"") -> bool:
        if getattr(fields, "transaction_id", "") == "broken":
            raise ValueError("planted")
        return super().send_oneway(code, fields, bytes(body))  # type: ignore[call-overload]  # bytes


@pytest.fixture
def bench_with_broken_half() -> EscrowBench:
    bench = EscrowBench()
    bench.channel = BrokenChannel("127.0.0.1:40000")
    for key in ("first", "broken", "last"):
        bench.park(key)
    return bench


def test_a_check_that_fails_sets_one_half_aside_and_others_are_checked(
    bench_with_broken_half: EscrowBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_with_broken_half
    bench.tick(after_ms=ESCROW.immunity_ms)
    assert {key for key, _ in sent_checks(bench.channel)} == {"first", "last"}
    half = bench.coordinator.halves.find_by_key("p", "T", b"broken")
    assert half is not None
    assert half.reason == "set aside: its check failed: planted"
    assert bench.coordinator.counters.set_aside_halves == 1
    assert "transaction set aside id=broken" in caplog.text
    caplog.clear()
    bench.tick(after_ms=ESCROW.check_interval_ms)
    assert {key for key, _ in sent_checks(bench.channel)} == {"first", "last"}
    assert caplog.text == "", "a half is reported once"


def test_a_half_that_was_set_aside_can_be_resumed_and_decided(
    bench_with_broken_half: EscrowBench,
) -> None:
    bench = bench_with_broken_half
    bench.tick(after_ms=ESCROW.immunity_ms)
    sent_checks(bench.channel)
    half = bench.coordinator.halves.find_by_key("p", "T", b"broken")
    assert half is not None
    position = HalfPosition(half.queue_offset, half.log_offset)
    assert bench.state(position) == "open"
    working_channel = FakeChannel("127.0.0.1:40001")
    bench.heartbeat(working_channel, "p")
    bench.disconnect(bench.channel)
    bench.channel = working_channel
    resume(bench, "broken")
    assert bench.end(position, UNKNOWN, check=True).code == 0
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"broken"]
