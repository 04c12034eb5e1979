"""Recovery of a directory with another configuration or with unknown files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import StoreDamaged
from tests.support.store_recovery import check_content, check_usable, make_store, reopen
from tests.support.stores import TINY

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"segment_bytes": 8192}, "mappedFileSizeCommitLog"),
        ({"segment_bytes": 6144}, "mappedFileSizeCommitLog"),
        ({"queue_file_bytes": 60}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 200}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 120}, "mappedFileSizeConsumeQueue"),
    ],
)
def test_another_file_size_is_an_error_and_changes_nothing(
    root: Path, wrong: dict[str, int], said: str
) -> None:
    kept = make_store(root, killed=False)
    sizes = file_sizes(root)
    settings = replace(TINY, **wrong)  # type: ignore[arg-type]
    with pytest.raises(StoreDamaged, match=said):
        reopen(root, settings)
    assert file_sizes(root) == sizes
    check_usable(root, reopen(root), kept)


def test_a_smaller_segment_size_is_refused(root: Path) -> None:
    settings = replace(TINY, segment_bytes=8192)
    kept = make_store(root, killed=False, settings=settings)
    with pytest.raises(StoreDamaged, match=r"has 8192 bytes.*mappedFileSizeCommitLog"):
        reopen(root)
    check_usable(root, reopen(root, settings), kept, settings)


def file_sizes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for directory in ("commitlog", "consumequeue", "index")
        for path in (root / directory).rglob("*")
        if path.is_file()
    }


def test_an_index_of_another_size_is_rebuilt(root: Path) -> None:
    kept = make_store(root, killed=False)
    settings = replace(TINY, index_slots=11, index_entries=33)
    check_usable(root, reopen(root, settings), kept, settings)


@pytest.mark.parametrize(
    "name",
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
def test_files_of_unknown_names_are_left_alone(root: Path, name: str) -> None:
    kept = make_store(root, killed=True)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"{}")
    store = reopen(root)
    assert (root / name).exists() or name.endswith(".tmp")
    check_content(store, kept)
    store.close()
    again = reopen(root)
    check_content(again, kept)
    again.close()
