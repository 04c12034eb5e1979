"""Compressed bodies: those of other clients, decompression bombs, and damaged ones."""

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

TYPES = [record.COMPRESSION_ZLIB, record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD]
BODY = b"The quick brown fox jumps over the lazy dog. " * 200


def flag_of(compression: int) -> int:
    return record.with_compression(0, compression)


@pytest.mark.parametrize("compression", TYPES)
def test_a_compressed_body_is_smaller_and_decompresses_to_the_same(compression: int) -> None:
    compressed = compress_body(BODY, compression)
    assert len(compressed) < len(BODY)
    assert decompress_body(compressed, flag_of(compression), body_bytes_max=len(BODY)) == BODY


def test_the_compressed_bit_without_a_type_is_zlib() -> None:
    compressed = zlib.compress(BODY, 5)
    assert decompress_body(compressed, record.COMPRESSED, body_bytes_max=len(BODY)) == BODY
    assert compress_body(BODY, 0) == compressed


def test_without_the_bit_the_body_is_returned_unchanged() -> None:
    flag = record.COMPRESSION_ZSTD | record.TRANSACTION_PREPARED
    assert decompress_body(memoryview(BODY), flag, body_bytes_max=1) == BODY


@pytest.mark.parametrize("compression", TYPES)
def test_a_body_one_byte_above_the_limit_is_refused(compression: int) -> None:
    compressed = compress_body(BODY, compression)
    with pytest.raises(BrokenBody):
        decompress_body(compressed, flag_of(compression), body_bytes_max=len(BODY) - 1)


@pytest.mark.parametrize("compression", TYPES)
def test_a_decompression_bomb_is_refused_before_it_uses_much_memory(compression: int) -> None:
    bomb = compress_body(bytes(16 << 20), compression)
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(BrokenBody):
            decompress_body(bomb, flag_of(compression), body_bytes_max=1 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 << 20


@pytest.mark.parametrize("compression", TYPES)
def test_incomplete_data_is_refused(compression: int) -> None:
    compressed = compress_body(BODY, compression)
    for length in (0, 1, len(compressed) // 2, len(compressed) - 1):
        with pytest.raises(BrokenBody):
            decompress_body(compressed[:length], flag_of(compression), body_bytes_max=len(BODY))


@pytest.mark.parametrize("compression", TYPES)
def test_an_empty_body_can_be_compressed(compression: int) -> None:
    compressed = compress_body(b"", compression)
    assert decompress_body(compressed, flag_of(compression), body_bytes_max=0) == b""


@pytest.mark.parametrize("garbage", [b"garbage", gzip.compress(BODY), b"\x00" * 100])
@pytest.mark.parametrize("compression", TYPES)
def test_garbage_is_refused(compression: int, garbage: bytes) -> None:
    with pytest.raises(BrokenBody):
        decompress_body(garbage, flag_of(compression), body_bytes_max=1 << 20)


@pytest.mark.parametrize("compression", [0x400, 0x500, 0x600, 0x700])
def test_an_unknown_type_is_refused(compression: int) -> None:
    with pytest.raises(BrokenBody):
        decompress_body(BODY, flag_of(compression), body_bytes_max=1 << 20)
    with pytest.raises(LocalProtocolError):
        compress_body(BODY, compression)


def test_lz4_is_the_frame_format_that_java_writes() -> None:
    assert compress_body(BODY, record.COMPRESSION_LZ4)[:4] == b"\x04\x22\x4d\x18"
    compressor = lz4.frame.LZ4FrameCompressor()
    data = compressor.begin() + compressor.compress(BODY) + compressor.flush()
    flag = flag_of(record.COMPRESSION_LZ4)
    assert decompress_body(data, flag, body_bytes_max=len(BODY)) == BODY


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="uses zstandard")
def test_a_zstd_frame_without_its_size_is_decompressed() -> None:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=5).compressobj()
    data = compressor.compress(BODY) + compressor.flush()
    assert zstandard.frame_content_size(data) == -1
    flag = flag_of(record.COMPRESSION_ZSTD)
    assert decompress_body(data, flag, body_bytes_max=len(BODY)) == BODY
    with pytest.raises(BrokenBody):
        decompress_body(data, flag, body_bytes_max=len(BODY) - 1)
