"""Fixtures: a store in memory, and a directory for a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import open_store


@pytest.fixture
def store() -> MessageStore:
    return open_store(MemoryDisk())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"
