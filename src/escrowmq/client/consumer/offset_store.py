"""Where a consumer begins in a queue, and where it notes how far it is.

A group notes it at the broker of the queue. Who broadcasts has a file of its own.
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
    """A datetime."""

    def timestamp(self) -> float: ...


ConsumeFrom = Literal["earliest", "latest"] | SupportsTimestamp


def consume_from_where(start: ConsumeFrom) -> str:
    """RocketMQ's name for it. Raises ValueError."""
    if start == "earliest":
        return "CONSUME_FROM_FIRST_OFFSET"
    if start == "latest":
        return "CONSUME_FROM_LAST_OFFSET"
    if isinstance(start, str) or not hasattr(start, "timestamp"):
        raise ValueError(f"start is 'earliest', 'latest' or a datetime, not {start!r}")
    return "CONSUME_FROM_TIMESTAMP"


class OffsetStore(Protocol):
    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        """`is_late`: the queue was not there when its consumer began."""

    async def write(self, queue: MessageQueue, offset: int) -> None: ...

    async def flush(self) -> None:
        """What was written is safe."""

    def close(self) -> None: ...


class BrokerOffsetStore:
    def __init__(self, queue_client: QueueClient) -> None:
        self._queue_client = queue_client

    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        return await self._queue_client.committed(queue, zero_if_not_found=is_new_queue)

    async def write(self, queue: MessageQueue, offset: int) -> None:
        await self._queue_client.commit(queue, offset)

    async def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class FileOffsetStore:
    """`{"offsets": [{"topic": …, "broker": …, "queue_id": …, "offset": …}, …]}`

    Raises ConfigError if the file cannot be used, or if another consumer uses it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[tuple[str, str, int], int] = {}
        self._is_dirty = False
        self._lock = _lock_file(path)
        with contextlib.suppress(FileNotFoundError):
            self._load()

    async def read(self, queue: MessageQueue, *, is_new_queue: bool) -> int | None:
        return self._offsets.get(queue[:3])

    async def write(self, queue: MessageQueue, offset: int) -> None:
        self._offsets[queue[:3]] = offset
        self._is_dirty = True

    async def flush(self) -> None:
        if self._is_dirty:
            self._is_dirty = False
            rows = [
                {"topic": topic, "broker": broker, "queue_id": queue_id, "offset": offset}
                for (topic, broker, queue_id), offset in sorted(self._offsets.items())
            ]
            await asyncio.to_thread(self._save, rows)

    def _save(self, rows: list[dict[str, object]]) -> None:
        # Whole or not at all, whenever the machine stops.
        fresh = self._path.with_name(self._path.name + ".new")
        with fresh.open("w") as file:
            json.dump({"offsets": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)

    def close(self) -> None:
        self._lock.close()

    def _load(self) -> None:
        try:
            for row in json.loads(self._path.read_text())["offsets"]:
                place = row["topic"], row["broker"], int(row["queue_id"])
                self._offsets[place] = int(row["offset"])
        except (ValueError, KeyError, TypeError) as error:
            self._lock.close()
            raise ConfigError(
                f"{self._path} does not hold offsets ({error!r}): "
                "remove it to begin anew, or name another with offsets="
            ) from error


def default_offsets_path(group: str) -> Path:
    return Path.home() / ".escrowmq" / "offsets" / f"{group.replace('/', '_')}.json"


def _lock_file(path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"offsets cannot be kept in {path}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"another consumer keeps its offsets in {path}: give each one its own with offsets="
        ) from error
    return lock
