"""Bodies compressed by others, bombs, and damage."""

from __future__ import annotations

import gzip
import sys
import tracemalloc
import zlib

import lz4.frame
import pytest

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message import record
from escrowmq.message.compression import compress_body, decompress_body

KINDS = [record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD]
BODY = b"The quick brown fox jumps over the lazy dog. " * 200


def mark(kind: int) -> int:
    return record.with_compression(0, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_body_is_smaller_and_decompresses_to_the_same(kind: int) -> None:
    small = compress_body(BODY, kind)
    assert len(small) < len(BODY)
    assert decompress_body(small, mark(kind), body_bytes_max=len(BODY)) == BODY


def test_the_compressed_bit_without_a_type_is_zlib() -> None:
    small = zlib.compress(BODY, 5)
    assert decompress_body(small, record.COMPRESSED, body_bytes_max=len(BODY)) == BODY
    assert compress_body(BODY, 0) == small


def test_without_the_bit_the_body_is_left_alone() -> None:
    flag = record.COMPRESSION_ZSTD | record.TRANSACTION_PREPARED
    assert decompress_body(memoryview(BODY), flag, body_bytes_max=1) == BODY


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_is_the_last_size_that_passes(kind: int) -> None:
    small = compress_body(BODY, kind)
    with pytest.raises(BrokenBody):
        decompress_body(small, mark(kind), body_bytes_max=len(BODY) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_refused_before_it_is_large(kind: int) -> None:
    bomb = compress_body(bytes(16 << 20), kind)
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(BrokenBody):
            decompress_body(bomb, mark(kind), body_bytes_max=1 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_incomplete_data_is_refused(kind: int) -> None:
    small = compress_body(BODY, kind)
    for length in (0, 1, len(small) // 2, len(small) - 1):
        with pytest.raises(BrokenBody):
            decompress_body(small[:length], mark(kind), body_bytes_max=len(BODY))


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_body_can_be_compressed(kind: int) -> None:
    assert decompress_body(compress_body(b"", kind), mark(kind), body_bytes_max=0) == b""


@pytest.mark.parametrize("garbage", [b"garbage", gzip.compress(BODY), b"\x00" * 100])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_refused(kind: int, garbage: bytes) -> None:
    with pytest.raises(BrokenBody):
        decompress_body(garbage, mark(kind), body_bytes_max=1 << 20)


@pytest.mark.parametrize("kind", [0x400, 0x500, 0x600, 0x700])
def test_an_unknown_type_is_refused(kind: int) -> None:
    with pytest.raises(BrokenBody):
        decompress_body(BODY, mark(kind), body_bytes_max=1 << 20)
    with pytest.raises(LocalProtocolError):
        compress_body(BODY, kind)


def test_lz4_is_the_frame_format_that_java_writes() -> None:
    assert compress_body(BODY, record.COMPRESSION_LZ4)[:4] == b"\x04\x22\x4d\x18"
    streamed = lz4.frame.LZ4FrameCompressor()
    written = streamed.begin() + streamed.compress(BODY) + streamed.flush()
    flag = mark(record.COMPRESSION_LZ4)
    assert decompress_body(written, flag, body_bytes_max=len(BODY)) == BODY


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="uses zstandard")
def test_a_zstd_frame_may_leave_its_size_open() -> None:
    import zstandard

    streamed = zstandard.ZstdCompressor(level=5).compressobj()
    written = streamed.compress(BODY) + streamed.flush()
    assert zstandard.frame_content_size(written) == -1
    flag = mark(record.COMPRESSION_ZSTD)
    assert decompress_body(written, flag, body_bytes_max=len(BODY)) == BODY
    with pytest.raises(BrokenBody):
        decompress_body(written, flag, body_bytes_max=len(BODY) - 1)
