"""Each bit of the sysFlag against the table of the protocol."""

from __future__ import annotations

import pytest

from escrowmq.message import record


def test_every_bit_has_its_meaning() -> None:
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


@pytest.mark.parametrize("kind", [0, 4, 8, 12])
@pytest.mark.parametrize("others", [0, 0x7F3, 0x31])
def test_the_transaction_type_replaces_the_one_before_and_nothing_else(
    kind: int, others: int
) -> None:
    for before in (0, 4, 8, 12):
        changed = record.with_transaction_type(others | before, kind)
        assert record.transaction_type(changed) == kind
        assert changed & ~record.TRANSACTION_MASK == others


def test_compression_is_marked_and_no_other_bit_changes() -> None:
    others = record.TRANSACTION_PREPARED | record.BORN_HOST_IPV6
    marked = record.with_compression(others | record.COMPRESSION_LZ4, record.COMPRESSION_ZSTD)
    assert marked == others | 0x201
    assert record.is_compressed(marked)
    assert not record.is_compressed(others)
