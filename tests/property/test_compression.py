"""Any body comes back from any compression; damage is a BrokenBody, never more than the limit."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message import record
from escrowmq.message.compression import compress_body, decompress_body

kinds = st.sampled_from([record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD])
repeated = st.builds(
    lambda piece, times: piece * times, st.binary(max_size=20), st.integers(0, 500)
)
bodies = st.one_of(st.binary(max_size=300), repeated)


@given(bodies, kinds, st.integers(1, 9))
def test_round_trip(body: bytes, kind: int, level: int) -> None:
    small = compress_body(body, kind, level=level)
    flag = record.with_compression(0, kind)
    assert decompress_body(small, flag, body_bytes_max=len(body)) == body


@given(bodies, kinds, st.data())
def test_damage_is_refused_or_stays_within_the_limit(
    body: bytes, kind: int, data: st.DataObject
) -> None:
    damaged = bytearray(compress_body(body, kind))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    limit = data.draw(st.integers(0, 1_000))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for written in (bytes(damaged), cut):
        with contextlib.suppress(BrokenBody):
            read = decompress_body(written, record.with_compression(0, kind), body_bytes_max=limit)
            assert len(read) <= limit


@given(st.binary(max_size=100), st.integers(0, 0x7FF))
def test_garbage_is_refused_or_stays_within_the_limit(garbage: bytes, sys_flag: int) -> None:
    with contextlib.suppress(BrokenBody):
        assert len(decompress_body(garbage, sys_flag, body_bytes_max=100)) <= 100
