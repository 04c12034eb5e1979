"""Fixtures: a store in memory, a directory for a store, and a closed store on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.support.store_damage import make
from tests.support.stores import open_store


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def clean(root: Path) -> Path:
    """Return the directory of a store that was closed."""
    return make(root)
