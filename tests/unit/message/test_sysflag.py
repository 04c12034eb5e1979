"""The bits of the sysFlag, compared with the protocol."""

from __future__ import annotations

import pytest

from escrowmq.message import record


def test_the_constants_are_those_of_the_protocol() -> None:
    assert (record.COMPRESSED, record.MULTI_TAGS) == (1, 2)
    assert (
        record.TRANSACTION_NONE,
        record.TRANSACTION_PREPARED,
        record.TRANSACTION_COMMIT,
        record.TRANSACTION_ROLLBACK,
    ) == (0, 4, 8, 12)
    assert (record.BORN_HOST_IPV6, record.STORE_HOST_IPV6) == (16, 32)
    assert (record.NEED_UNWRAP, record.INNER_BATCH) == (64, 128)
    assert (record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD, record.COMPRESSION_ZLIB) == (
        0x100,
        0x200,
        0x300,
    )


@pytest.mark.parametrize("new_type", [0, 4, 8, 12])
@pytest.mark.parametrize("other_bits", [0, 0x7F3, 0x31])
def test_setting_the_transaction_type_changes_no_other_bit(new_type: int, other_bits: int) -> None:
    for old_type in (0, 4, 8, 12):
        changed = record.with_transaction_type(other_bits | old_type, new_type)
        assert record.transaction_type(changed) == new_type
        assert changed & ~record.TRANSACTION_MASK == other_bits


def test_setting_the_compression_changes_no_other_bit() -> None:
    other_bits = record.TRANSACTION_PREPARED | record.BORN_HOST_IPV6
    changed = record.with_compression(other_bits | record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD)
    assert changed == other_bits | 0x201
    assert record.is_compressed(changed)
    assert not record.is_compressed(other_bits)
