"""Each bit of the sysFlag against the table of the protocol."""

from __future__ import annotations

import pytest

from escrowmq.message import record as sysflag


def test_every_bit_has_its_place() -> None:
    assert (sysflag.COMPRESSED, sysflag.MULTI_TAGS) == (1, 2)
    assert (
        sysflag.TRANSACTION_NONE,
        sysflag.TRANSACTION_PREPARED,
        sysflag.TRANSACTION_COMMIT,
        sysflag.TRANSACTION_ROLLBACK,
    ) == (0, 4, 8, 12)
    assert (sysflag.BORN_HOST_IPV6, sysflag.STORE_HOST_IPV6) == (16, 32)
    assert (sysflag.NEED_UNWRAP, sysflag.INNER_BATCH) == (64, 128)
    assert (sysflag.COMPRESSION_LZ4, sysflag.COMPRESSION_ZSTD, sysflag.COMPRESSION_ZLIB) == (
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
        changed = sysflag.with_transaction_type(others | before, kind)
        assert sysflag.transaction_type(changed) == kind
        assert changed & ~sysflag.TRANSACTION_MASK == others


def test_compression_is_marked_and_cleared_and_nothing_else() -> None:
    others = sysflag.TRANSACTION_PREPARED | sysflag.BORN_HOST_IPV6
    marked = sysflag.with_compression(others | sysflag.COMPRESSION_LZ4, sysflag.COMPRESSION_ZSTD)
    assert marked == others | 0x201
    assert sysflag.is_compressed(marked)
    assert sysflag.without_compression(marked) == others
    assert not sysflag.is_compressed(others)
