"""Compressed bodies: zlib, LZ4 frames, zstd frames, told apart by the sysFlag.

The sender compresses, the broker stores what came, the consumer decompresses. A few bytes can
claim to be gigabytes, so every reader says how much it will take; more than that is a BrokenBody.
What follows the end of the compressed data is ignored, as Java's readers ignore it.
"""

from __future__ import annotations

import sys
import zlib
from typing import Final

import lz4.frame

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message import record as sysflag

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    import zstandard

DEFAULT_LEVEL: Final = 5  # what Java clients use

# zstd's readers are asked to support windows up to 8 MiB. A larger one costs memory at once.
_WINDOW_LOG_MAX = 23


def compress_body(
    body: bytes | memoryview,
    compression_type: int = sysflag.COMPRESSION_ZLIB,
    *,
    level: int = DEFAULT_LEVEL,
) -> bytes:
    """`kind` is one of sysflag's COMPRESSION_...; LZ4 has no level."""
    match compression_type:
        case 0 | sysflag.COMPRESSION_ZLIB:
            return zlib.compress(body, level)
        case sysflag.COMPRESSION_LZ4:
            return bytes(lz4.frame.compress(body))
        case sysflag.COMPRESSION_ZSTD:
            return _compress_zstd(body, level)
        case _:
            raise LocalProtocolError(f"compression 0x{compression_type:x} is not known")


def decompress_body(body: bytes | memoryview, sys_flag: int, *, body_bytes_max: int) -> bytes:
    """The body as its sender wrote it, compressed or not. Raises BrokenBody, whatever is wrong."""
    if not sysflag.is_compressed(sys_flag):
        return bytes(body)
    match sys_flag & sysflag.COMPRESSION_MASK:
        case 0 | sysflag.COMPRESSION_ZLIB:  # 0: a client older than the type bits
            return _decompress_zlib(body, body_bytes_max)
        case sysflag.COMPRESSION_LZ4:
            return _decompress_lz4(body, body_bytes_max)
        case sysflag.COMPRESSION_ZSTD:
            return _decompress_zstd(body, body_bytes_max)
        case kind:
            raise BrokenBody(f"compression 0x{kind:x} is not known")


def _decompress_zlib(body: bytes | memoryview, body_bytes_max: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        read = inflater.decompress(body, body_bytes_max + 1)
    except zlib.error as error:
        raise BrokenBody(f"zlib: {error}") from error
    return _check_complete("zlib", read, inflater.eof, body_bytes_max)


def _decompress_lz4(body: bytes | memoryview, body_bytes_max: int) -> bytes:
    inflater = lz4.frame.LZ4FrameDecompressor()
    try:
        read = bytes(inflater.decompress(body, max_length=body_bytes_max + 1))
    except RuntimeError as error:
        raise BrokenBody(f"LZ4: {error}") from error
    return _check_complete("LZ4", read, inflater.eof, body_bytes_max)


def _check_complete(name: str, data: bytes, is_complete: bool, body_bytes_max: int) -> bytes:
    if len(data) > body_bytes_max:
        raise BrokenBody(f"{name}: more than {body_bytes_max} bytes when decompressed")
    if not is_complete:
        raise BrokenBody(f"{name}: ends too early")
    return data


if sys.version_info >= (3, 14):

    def _compress_zstd(body: bytes | memoryview, level: int) -> bytes:
        return zstd.compress(body, level)

    def _decompress_zstd(body: bytes | memoryview, body_bytes_max: int) -> bytes:
        inflater = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
        )
        try:
            read = inflater.decompress(body, body_bytes_max + 1)
        except zstd.ZstdError as error:
            raise BrokenBody(f"zstd: {error}") from error
        return _check_complete("zstd", read, inflater.eof, body_bytes_max)

else:

    def _compress_zstd(body: bytes | memoryview, level: int) -> bytes:
        return zstandard.ZstdCompressor(level=level).compress(body)

    def _decompress_zstd(body: bytes | memoryview, body_bytes_max: int) -> bytes:
        inflater = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG_MAX)
        try:
            # A size that is written in the frame is believed and allocated: ask it first.
            if zstandard.frame_content_size(body) > body_bytes_max:
                raise BrokenBody(f"zstd: more than {body_bytes_max} bytes when decompressed")
            # Without one, a frame that does not fit into `max_output_size` is an error.
            return inflater.decompress(body, max_output_size=max(body_bytes_max, 1))
        except zstandard.ZstdError as error:
            raise BrokenBody(f"zstd: {error}") from error
