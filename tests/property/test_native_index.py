"""The native version of the key index does what the Python version does."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.native import NativePath, load_native
from escrowmq.store import key_index
from escrowmq.store.disk import OpenFiles, read_file
from escrowmq.store.key_index import FileChange, KeyIndex, apply_changes
from escrowmq.testing.disks import MemoryDisk

NATIVE = load_native({})
pytestmark = pytest.mark.skipif(NATIVE.module is None, reason=NATIVE.reason)
SLOTS, ENTRIES = 7, 50

KEYS = st.tuples(
    st.sampled_from(["T", "orders"]), st.binary(min_size=1, max_size=12), st.integers(0, 3)
)


def new_index(native: NativePath) -> tuple[MemoryDisk, KeyIndex]:
    disk = MemoryDisk()
    index = KeyIndex(disk, OpenFiles(disk), slot_count=SLOTS, entry_count=ENTRIES, native=native)
    return disk, index


@given(st.lists(st.lists(KEYS, min_size=1, max_size=20), min_size=1, max_size=5))
@settings(deadline=None)
def test_both_versions_write_the_same_files(flushes: list[list[tuple[str, bytes, int]]]) -> None:
    # Private: so few keys would be linked by the Python version alone.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_index, "_SINGLE_READS_MAX", 0)
        contents = []
        for native in (NATIVE, NativePath(None, "a test")):
            disk, index = new_index(native)
            log_offset, stored_ms = 0, 1_700_000_000_000
            for keys in flushes:
                for topic, key, seconds in keys:
                    log_offset, stored_ms = log_offset + 100, stored_ms + seconds * 1000
                    index.add(topic, [key], log_offset, stored_ms)
                flush = index.begin_flush(stored_ms)
                flush.run()
                index.finish_flush(flush)
            paths = [file.path for file in index.files] + [f.checksum_path for f in index.files]
            contents.append({path: read_file(disk, path) for path in paths})
    assert contents[0] == contents[1]


@given(
    st.dictionaries(st.integers(0, 30_000), st.binary(min_size=4, max_size=4), max_size=80),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_words_are_written_wherever_they_are(words: dict[int, bytes], random: object) -> None:
    pairs = list(words.items())
    random.shuffle(pairs)  # type: ignore[attr-defined]  # a Random; Hypothesis declares its own
    encoded = b"".join((4 * slot).to_bytes(4, "big") + value for slot, value in pairs)
    contents = []
    for native in (NATIVE.module, None):
        disk = MemoryDisk()
        apply_changes(disk, [FileChange("index/1", 130_000, [], encoded)], native)
        contents.append(read_file(disk, "index/1"))
    assert contents[0] == contents[1]


def test_a_slot_with_the_number_of_no_entry_counts_as_empty() -> None:
    """It is damaged: entries are numbered from 1, and the new one is the 5th."""
    assert NATIVE.module is not None
    column = (1).to_bytes(8, sys.byteorder)
    for held, previous in ((4, 4), (5, 0), (2**31, 0)):
        linked = NATIVE.module.link_entries(
            (3).to_bytes(4, sys.byteorder),
            column,
            column,
            begin_ms=0,
            slot_count=1,
            first=5,
            slots=held.to_bytes(4, "big"),
        )
        assert bytes(linked.entries)[-4:] == previous.to_bytes(4, "big")
