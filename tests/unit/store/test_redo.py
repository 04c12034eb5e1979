"""Changes of single words in an index file: each word is written, and nothing else changes."""

from __future__ import annotations

import random
import struct

import pytest

from escrowmq.store.key_index import FileChange, apply_changes
from escrowmq.testing.disks import FaultyDisk

FILE_BYTES = 5 * 4096 + 100
INDEX_PATH = "index/1"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 60, 500, 5000])
def test_every_word_is_written_to_its_position_and_nothing_else_changes(count: int) -> None:
    disk, rng = FaultyDisk(), random.Random(count)
    before = rng.randbytes(FILE_BYTES)
    file = disk.create(INDEX_PATH, FILE_BYTES)
    file.write_at(0, before)
    file.close()
    word_numbers = rng.sample(range(FILE_BYTES // 4), count)
    new_words = {4 * word_number: rng.getrandbits(32) for word_number in word_numbers}
    words = b"".join(struct.pack(">II", *pair) for pair in new_words.items())

    apply_changes(disk, [FileChange(INDEX_PATH, FILE_BYTES, [], words)])

    expected = bytearray(before)
    for position, word in new_words.items():
        struct.pack_into(">I", expected, position, word)
    opened = disk.open(INDEX_PATH)
    assert opened.read_at(0, opened.size) == bytes(expected)
    opened.close()
