"""Where a consumer starts in a queue, and where it stores the offsets that it has committed.

A group stores them with the broker of each queue. A broadcast consumer has a file of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Literal, Protocol, TextIO

from escrowmq.client.consumer.queue_client import QueueClient
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import ConfigError


class SupportsTimestamp(Protocol):
    """A point in time, such as a datetime."""

    def timestamp(self) -> float: ...


ConsumeFrom = Literal["earliest", "latest"] | SupportsTimestamp


def consume_from_where(start: ConsumeFrom) -> str:
    """Return RocketMQ's name of a start position. Raises ValueError for an invalid one."""
    if start == "earliest":
        return "CONSUME_FROM_FIRST_OFFSET"
    if start == "latest":
        return "CONSUME_FROM_LAST_OFFSET"
    if isinstance(start, str) or not hasattr(start, "timestamp"):
        raise ValueError(f"start must be 'earliest', 'latest' or a datetime, not {start!r}")
    return "CONSUME_FROM_TIMESTAMP"


class OffsetStore(Protocol):
    """Committed offsets of one consumer."""

    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        """Return the committed offset; None if there is none.

        `is_new_queue`: the queue appeared while the consumer was running.
        """

    async def write(self, queue: MessageQueue, offset: int) -> None: ...

    async def flush(self) -> None:
        """Make everything written durable."""

    def close(self) -> None: ...


class BrokerOffsetStore:
    """Stores the offsets of a group with the broker of each queue."""

    def __init__(self, queue_client: QueueClient) -> None:
        self._queue_client = queue_client

    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        # A queue that appeared during consumption must be read from its start, even by a group
        # that starts at "latest": messages sent before the rebalance would be lost otherwise.
        return await self._queue_client.committed(queue, zero_if_not_found=is_new_queue)

    async def write(self, queue: MessageQueue, offset: int) -> None:
        await self._queue_client.commit(queue, offset)

    async def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class FileOffsetStore:
    """Stores the offsets of a broadcast consumer in a file.

        {"offsets": [{"topic": ..., "broker": ..., "queue_id": ..., "offset": ...}, ...]}

    Raises ConfigError if the file cannot be used, or if another consumer uses it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[MessageQueue, int] = {}
        self._is_dirty = False
        self._lock = _lock_file(path)
        with contextlib.suppress(FileNotFoundError):
            self._load()

    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        return self._offsets.get(queue)

    async def write(self, queue: MessageQueue, offset: int) -> None:
        self._offsets[queue] = offset
        self._is_dirty = True

    async def flush(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            rows = [
                {**queue._asdict(), "offset": offset}
                for queue, offset in sorted(self._offsets.items())
            ]
            await asyncio.to_thread(self._save, rows)

    def close(self) -> None:
        self._lock.close()

    def _save(self, rows: list[dict[str, object]]) -> None:
        # Write a new file and rename it, so that a crash leaves the old one or the new one.
        new_path = self._path.with_name(self._path.name + ".new")
        with new_path.open("w") as file:
            json.dump({"offsets": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(self._path)

    def _load(self) -> None:
        try:
            for row in json.loads(self._path.read_text())["offsets"]:
                queue = MessageQueue(row["topic"], row["broker"], int(row["queue_id"]))
                self._offsets[queue] = int(row["offset"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._lock.close()
            raise ConfigError(
                f"{self._path} is not a file of offsets ({error!r}); remove it to start again, or "
                "give another one with offsets_file="
            ) from error


def default_offsets_path(group: str) -> Path:
    return Path.home() / ".escrowmq" / "offsets" / f"{group.replace('/', '_')}.json"


def _lock_file(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot store offsets in {path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"another consumer stores its offsets in {path}; give each consumer its own file "
            "with offsets_file="
        ) from error
    return lock
