"""Every compression restores every body; damage raises BrokenBody or stays within the limit."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message import record
from escrowmq.message.compression import compress_body, decompress_body
from tests.property.damage import damaged

compression_types = st.sampled_from(
    [record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD]
)
repeated = st.builds(
    lambda piece, count: piece * count, st.binary(max_size=20), st.integers(0, 500)
)
bodies = st.one_of(st.binary(max_size=300), repeated)


@given(bodies, compression_types, st.integers(1, 9))
def test_a_compressed_body_is_decompressed_unchanged(
    body: bytes, compression_type: int, level: int
) -> None:
    compressed = compress_body(body, compression_type, level=level)
    sys_flag = record.with_compression(0, compression_type)
    assert decompress_body(compressed, sys_flag, body_bytes_max=len(body)) == body


@given(bodies, compression_types, st.data())
def test_a_damaged_body_is_refused_or_stays_within_the_limit(
    body: bytes, compression_type: int, data: st.DataObject
) -> None:
    whole = data.draw(damaged(compress_body(body, compression_type), changes_max=3))
    limit = data.draw(st.integers(0, 1_000))
    truncated = whole[: data.draw(st.integers(0, len(whole)))]
    for content in (whole, truncated):
        with contextlib.suppress(BrokenBody):
            decompressed = decompress_body(
                content, record.with_compression(0, compression_type), body_bytes_max=limit
            )
            assert len(decompressed) <= limit


@given(st.binary(max_size=100), st.integers(0, 0x7FF))
def test_garbage_is_refused_or_stays_within_the_limit(garbage: bytes, sys_flag: int) -> None:
    with contextlib.suppress(BrokenBody):
        assert len(decompress_body(garbage, sys_flag, body_bytes_max=100)) <= 100
