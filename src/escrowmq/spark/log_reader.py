"""Read the commit-log files of a broker from disk, whether it runs or not, ours or Apache's.

A file is cut into ranges of bytes without a look into it. The task that gets one finds the first
record in it by itself: a record begins with its size and a magic and holds its own log offset, and
nothing else looks like that. A record belongs to the range in which it begins.

Behind the last record there are zeros, or what a crash left. So a place that is no record is the
end, unless records follow it in the same file: then it is damage, which fails the query or, with
failOnDataLoss=false, is stepped over.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from escrowmq.errors import BadOption, CorruptRecord, DataLost
from escrowmq.message.record import (
    BLANK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    LogOffset,
    decode_record,
)
from escrowmq.spark import options
from escrowmq.spark.cluster import TRANSACTION_TOPICS
from escrowmq.spark.columns import MessageColumns, is_one_of, text
from escrowmq.spark.options import Chosen
from escrowmq.spark.range_pull import BLOCK_BYTES, BLOCK_ROWS
from escrowmq.spark.readers import rules_of
from escrowmq.spark.records import Bytes, Records, walk
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"\d{20}")
_MAGICS: Final = re.compile(
    b"|".join(re.escape(magic.to_bytes(4, "big")) for magic in (MAGIC_V1, MAGIC_V2))
)
_PAGE: Final = 4096
LOOKED_AT: Final = 64 << 20  # bytes behind a bad place, for a record that would make it damage


@dataclass(frozen=True)
class LogRange(InputPartition):
    """Bytes of log files: name, first, behind the last."""

    ranges: tuple[tuple[str, int, int], ...]


class LogReader(DataSourceReader):
    def __init__(self, chosen: Chosen, columns: Columns, cores: int = 0) -> None:
        self._chosen = chosen
        self._columns = columns
        self._rules = rules_of(chosen, cores)
        self._mode = chosen[options.MODE]
        self._fail = chosen[options.FAIL_ON_DATA_LOSS]
        wanted = chosen[options.SUBSCRIBE]
        self._topics = list(TRANSACTION_TOPICS) if self._is_about_transactions else wanted

    @property
    def _is_about_transactions(self) -> bool:
        return self._mode == options.TRANSACTIONS

    def partitions(self) -> Sequence[InputPartition]:
        files = log_files(Path(self._chosen[options.PATH]))
        used = [(str(path), used_bytes(path)) for path in files]
        total = sum(size for _, size in used)
        tasks = min(self._rules.tasks(total), max(1, total // (64 << 10)))
        share = -(-total // tasks)
        found: list[list[tuple[str, int, int]]] = [[]]
        room = share
        for name, size in used:
            at = 0
            while at < size:
                count = min(room, size - at)
                # How much is used is a guess: the last range of a file reaches to its end.
                end = os.path.getsize(name) if at + count == size else at + count
                found[-1].append((name, at, end))
                at, room = at + count, room - count
                if not room:
                    found.append([])
                    room = share
        return [LogRange(tuple(task)) for task in found if task] or [LogRange(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, LogRange)
        for name, begin, end in partition.ranges:
            for records in records_of(Path(name), begin, end, fail=self._fail):
                yield from self._batches(records)

    def _batches(self, records: Records) -> Iterator[pa.RecordBatch]:
        if self._topics:
            records = records.where(is_one_of(text(records.topic), self._topics))
        if not self._is_about_transactions:
            if len(records):
                yield MessageColumns(records, None, None).batch(self._columns)
            return
        topics = text(records.topic)
        for topic in self._topics:
            some = records.where(is_one_of(topics, [topic]))
            if len(some):
                yield TransactionColumns(some, topic, None).batch(self._columns)


def log_files(directory: Path) -> list[Path]:
    """Raises BadOption if there is no log: `directory` is a store's, or its commitlog itself."""
    inside = directory / "commitlog"
    place = inside if inside.is_dir() else directory
    try:
        found = sorted(path for path in place.iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:
        raise BadOption(f"option path: {error.strerror}: {place}") from error
    if not found:
        raise BadOption(f"option path: no commit log in {directory}; is it a broker's directory?")
    return found


def used_bytes(path: Path) -> int:
    """About how much of a file was written: files have their full length from the start."""
    size = path.stat().st_size
    with path.open("rb") as file:
        low, high = 0, -(-size // _PAGE)
        while low < high:
            middle = (low + high) // 2
            file.seek(middle * _PAGE)
            if any(file.read(_PAGE)):
                low = middle + 1
            else:
                high = middle
    return max(1, min(size, low * _PAGE)) if size else 0


def records_of(path: Path, begin: int, end: int, *, fail: bool) -> Iterator[Records]:
    """The records that begin in this range of bytes, some thousands at a time."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if fail:
            raise DataLost(f"{path}: {error.strerror}; it may have expired meanwhile") from error
        return
    data = np.frombuffer(mapped, np.uint8)
    base = int(path.name)
    at = 0 if begin == 0 else next_record(mapped, base, begin, end)
    while at is not None and at < end:
        records, following = _some_records(data, base, at, end)
        if len(records):
            yield records
            at = following
            continue
        behind = None if _is_end(mapped, at) else next_record(mapped, base, at + 1, at + LOOKED_AT)
        if behind is None:
            return  # zeros, a blank record, or a torn end
        if fail:
            raise DataLost(
                f"{path}: no record at log offset {base + at}, and records behind it: "
                f"`escrowmq store check` says more; failOnDataLoss=false steps over it"
            )
        log.warning("damage was stepped over path=%s from=%d to=%d", path, at, behind)
        at = behind


def _some_records(data: Bytes, base: int, at: int, end: int) -> tuple[Records, int]:
    """Some records, and the place behind them. None: there is no record."""
    places, following = walk(data, at, min(end, at + BLOCK_BYTES))
    if len(places) > BLOCK_ROWS:
        following = places[BLOCK_ROWS]
        places = places[:BLOCK_ROWS]
    records = Records(data, np.array(places, np.int64))
    good = records.adds_up(base)
    if good.all():
        return records, following
    first_bad = int(np.argmin(good))
    return Records(data, records.at[:first_bad]), places[first_bad]


def _is_end(mapped: mmap.mmap, at: int) -> bool:
    """Whether the file ends here in order: with a blank record."""
    if at + BLANK.size > len(mapped):
        return True
    remaining, magic = BLANK.unpack_from(mapped, at)
    return bool(magic == MAGIC_BLANK and remaining == len(mapped) - at)


def next_record(mapped: mmap.mmap, base: int, at: int, limit: int) -> int | None:
    """Where the first whole record begins, at this place or behind it, but before the limit."""
    for found in _MAGICS.finditer(mapped, at + 4, limit + 8):
        place = found.start() - 4
        if len(mapped) - place < RECORD_BYTES_MIN:
            return None
        if int.from_bytes(mapped[place + 28 : place + 36], "big") != base + place:
            continue
        size = int.from_bytes(mapped[place : place + 4], "big", signed=True)
        try:
            decode_record(mapped[place : place + max(0, size)], 0, LogOffset(base + place))
        except CorruptRecord:
            continue
        return place
    return None
