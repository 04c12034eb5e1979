"""Compressed bodies: zlib, LZ4 frames and zstd frames. The sysFlag says which.

The sender compresses, the broker stores what it received, and the consumer decompresses. A few
bytes can expand to gigabytes, so every reader gives a limit; a body above it raises BrokenBody.
Bytes behind the end of the compressed data are ignored, as Java's readers ignore them.
"""

from __future__ import annotations

import sys
import zlib
from typing import Final

import lz4.frame

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message import record
from escrowmq.sliced_work import SlicedResult

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import zstandard

DEFAULT_LEVEL: Final = 5  # as in Java clients

# Decoders of zstd should support windows of up to 8 MiB (RFC 8878). A larger window is refused,
# because its memory is allocated at once.
_WINDOW_LOG_MAX = 23

# What is decompressed at a time, if others have to be served in between.
_INPUT_SLICE_BYTES: Final = 16 << 10
_OUTPUT_SLICE_BYTES: Final = 128 << 10


def compress_body(
    body: bytes | memoryview,
    compression_type: int = record.COMPRESSION_ZLIB,
    *,
    level: int = DEFAULT_LEVEL,
) -> bytes:
    """Return the compressed body. `compression_type` is one of record.COMPRESSION_….

    LZ4 ignores the level. Raises LocalProtocolError for an unknown type.
    """
    match compression_type:
        case 0 | record.COMPRESSION_ZLIB:
            return zlib.compress(body, level)
        case record.COMPRESSION_LZ4:
            return bytes(lz4.frame.compress(body))
        case record.COMPRESSION_ZSTD:
            return _compress_zstd(body, level)
        case _:
            raise LocalProtocolError(f"unknown compression type 0x{compression_type:x}")


def decompress_body(body: bytes | memoryview, sys_flag: int, *, body_bytes_max: int) -> bytes:
    """Return the body as its sender wrote it, whether it is compressed or not.

    Raises BrokenBody, whatever is wrong with it, also if it has more than `body_bytes_max` bytes.
    """
    if not record.is_compressed(sys_flag):
        return bytes(body)
    match sys_flag & record.COMPRESSION_MASK:
        case 0 | record.COMPRESSION_ZLIB:  # 0: the client is older than the type bits
            return _decompress_zlib(body, body_bytes_max)
        case record.COMPRESSION_LZ4:
            return _decompress_lz4(body, body_bytes_max)
        case record.COMPRESSION_ZSTD:
            return _decompress_zstd(body, body_bytes_max)
        case compression_type:
            raise BrokenBody(f"unknown compression type 0x{compression_type:x}")


def _decompress_zlib(body: bytes | memoryview, body_bytes_max: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(body, body_bytes_max + 1)
    except zlib.error as error:
        raise BrokenBody(f"zlib: {error}") from error
    return _check_complete("zlib", data, inflater.eof, body_bytes_max)


def decompress_in_slices(body: bytes | memoryview, *, bytes_max: int) -> SlicedResult[bytes]:
    """Decompress zlib in slices. Raises BrokenBody as `decompress_body` does."""
    inflater = zlib.decompressobj()
    pieces: list[bytes] = []
    size = 0
    try:
        for begin in range(0, len(body), _INPUT_SLICE_BYTES):
            data: bytes | memoryview = memoryview(body)[begin : begin + _INPUT_SLICE_BYTES]
            has_more = True
            while has_more and not inflater.eof:
                pieces.append(inflater.decompress(data, _OUTPUT_SLICE_BYTES))
                data = inflater.unconsumed_tail
                has_more = bool(data) or len(pieces[-1]) == _OUTPUT_SLICE_BYTES
                size += len(pieces[-1])
                if size > bytes_max:
                    raise BrokenBody(f"zlib: the decompressed body has more than {bytes_max} bytes")
                yield
    except zlib.error as error:
        raise BrokenBody(f"zlib: {error}") from error
    return _check_complete("zlib", b"".join(pieces), inflater.eof, bytes_max)


def _decompress_lz4(body: bytes | memoryview, body_bytes_max: int) -> bytes:
    inflater = lz4.frame.LZ4FrameDecompressor()
    try:
        data = bytes(inflater.decompress(body, max_length=body_bytes_max + 1))
    except RuntimeError as error:
        raise BrokenBody(f"LZ4: {error}") from error
    return _check_complete("LZ4", data, inflater.eof, body_bytes_max)


def _check_complete(name: str, data: bytes, is_complete: bool, body_bytes_max: int) -> bytes:
    if len(data) > body_bytes_max:
        raise BrokenBody(f"{name}: the decompressed body has more than {body_bytes_max} bytes")
    if not is_complete:
        raise BrokenBody(f"{name}: the compressed data is incomplete")
    return data


if sys.version_info >= (3, 14):

    def _compress_zstd(body: bytes | memoryview, level: int) -> bytes:
        return zstd.compress(body, level)

    def _decompress_zstd(body: bytes | memoryview, body_bytes_max: int) -> bytes:
        inflater = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
        )
        try:
            data = inflater.decompress(body, body_bytes_max + 1)
        except zstd.ZstdError as error:
            raise BrokenBody(f"zstd: {error}") from error
        return _check_complete("zstd", data, inflater.eof, body_bytes_max)

else:

    def _compress_zstd(body: bytes | memoryview, level: int) -> bytes:
        return zstandard.ZstdCompressor(level=level).compress(body)

    def _decompress_zstd(body: bytes | memoryview, body_bytes_max: int) -> bytes:
        inflater = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG_MAX)
        try:
            # The library allocates the size that the frame declares, so check it first.
            if zstandard.frame_content_size(body) > body_bytes_max:
                raise BrokenBody(
                    f"zstd: the decompressed body has more than {body_bytes_max} bytes"
                )
            # A frame without a size raises an error if it does not fit into `max_output_size`.
            return inflater.decompress(body, max_output_size=max(body_bytes_max, 1))
        except zstandard.ZstdError as error:
            raise BrokenBody(f"zstd: {error}") from error
