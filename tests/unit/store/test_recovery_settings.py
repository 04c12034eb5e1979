"""Recovery of a directory with changed settings or with unknown files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import StoreDamaged
from tests.support.store_recovery import check_content, check_life, make, reopen
from tests.support.stores import TINY

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"segment_bytes": 8192}, "mappedFileSizeCommitLog"),
        ({"segment_bytes": 6144}, "mappedFileSizeCommitLog"),
        ({"queue_file_bytes": 60}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 200}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 120}, "mappedFileSizeConsumeQueue"),
    ],
)
def test_a_changed_file_size_is_an_error_and_changes_nothing(
    root: Path, changes: dict[str, int], setting: str
) -> None:
    records = make(root, killed=False)
    sizes = file_sizes(root)
    settings = replace(TINY, **changes)  # type: ignore[arg-type]
    with pytest.raises(StoreDamaged, match=setting):
        reopen(root, settings)
    assert file_sizes(root) == sizes
    check_life(root, reopen(root), records)


def test_a_smaller_segment_size_is_refused(root: Path) -> None:
    settings = replace(TINY, segment_bytes=8192)
    records = make(root, killed=False, settings=settings)
    with pytest.raises(StoreDamaged, match=r"has 8192 bytes.*mappedFileSizeCommitLog"):
        reopen(root)
    check_life(root, reopen(root, settings), records, settings)


def file_sizes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for directory in ("commitlog", "consumequeue", "index")
        for path in (root / directory).rglob("*")
        if path.is_file()
    }


def test_an_index_of_another_size_is_rebuilt(root: Path) -> None:
    records = make(root, killed=False)
    settings = replace(TINY, index_slots=11, index_entries=33)
    check_life(root, reopen(root, settings), records, settings)


@pytest.mark.parametrize(
    "path",
    [
        "commitlog/notes.txt",
        "commitlog/.00000000000000000000.swp",
        "commitlog/123",
        "consumequeue/README",
        "consumequeue/T0/notes",
        "consumequeue/T0/0/notes",
        "consumequeue/T0/old/00000000000000000000",
        "consumequeue/not.a.topic/0/00000000000000000000",
        "consumequeue/T0/99999999999/00000000000000000000",
        "index/notes.txt",
        "escrowmq.checkpoint.tmp",
        "timerwheel",
        "config/topics.json",
    ],
)
def test_files_with_unknown_names_are_not_changed(root: Path, path: str) -> None:
    records = make(root, killed=True)
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(b"{}")
    store = reopen(root)
    assert (root / path).exists() or path.endswith(".tmp")  # recovery may remove temporary files
    check_content(store, records)
    store.close()
    reopened = reopen(root)
    check_content(reopened, records)
    reopened.close()
