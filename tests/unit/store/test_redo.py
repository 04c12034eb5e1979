"""Words that are written many at a time: each is in its position, and nothing else changes."""

from __future__ import annotations

import random
import struct

import pytest

from escrowmq.store.key_index import FileChange, apply_changes
from escrowmq.testing.disks import FaultyDisk

SIZE = 5 * 4096 + 100
PATH = "index/1"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 60, 500, 5000])
def test_words_are_written_where_they_belong(count: int) -> None:
    disk, chance = FaultyDisk(), random.Random(count)
    before = chance.randbytes(SIZE)
    file = disk.create(PATH, SIZE)
    file.write_at(0, before)
    file.close()
    places = chance.sample(range(SIZE // 4), count)
    wanted = {4 * place: chance.getrandbits(32) for place in places}
    words = b"".join(struct.pack(">II", *pair) for pair in wanted.items())

    apply_changes(disk, [FileChange(PATH, SIZE, [], words)])

    expected = bytearray(before)
    for position, word in wanted.items():
        struct.pack_into(">I", expected, position, word)
    opened = disk.open(PATH)
    assert bytes(opened.view()) == bytes(expected)
    opened.close()
