"""The bits of a message's sysFlag.

bit 0        the body is compressed
bit 1        several tags
bits 2-3     transaction: 0 none, 4 half, 8 commit, 12 rollback
bits 4, 5    born host, store host is IPv6
bits 6, 7    inner batch: needs unwrapping, is one
bits 8-10    how it is compressed: 0 and 0x300 zlib, 0x100 LZ4, 0x200 zstd
"""

from __future__ import annotations

from typing import Final

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2

TRANSACTION_MASK: Final = 0xC
TRANSACTION_NONE: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC

BORN_HOST_IPV6: Final = 0x10
STORE_HOST_IPV6: Final = 0x20

NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80

COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300


def transaction_type(sys_flag: int) -> int:
    return sys_flag & TRANSACTION_MASK


def with_transaction_type(sys_flag: int, kind: int) -> int:
    return sys_flag & ~TRANSACTION_MASK | kind


def is_compressed(sys_flag: int) -> bool:
    return bool(sys_flag & COMPRESSED)


def with_compression(sys_flag: int, kind: int) -> int:
    """Marks the body compressed in that way."""
    return sys_flag & ~COMPRESSION_MASK | COMPRESSED | kind


def without_compression(sys_flag: int) -> int:
    return sys_flag & ~(COMPRESSION_MASK | COMPRESSED)
