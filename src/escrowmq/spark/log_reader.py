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

from escrowmq.errors import CorruptRecord, DataLost, InvalidOption
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
from escrowmq.spark.columns import MessageColumns, decode_utf8, is_one_of
from escrowmq.spark.options import Options
from escrowmq.spark.planning import make_task_sizing
from escrowmq.spark.queues import TRANSACTION_TOPICS
from escrowmq.spark.range_pull import BLOCK_BYTES, BLOCK_ROWS
from escrowmq.spark.records import ByteArray, Records, find_records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns

log = logging.getLogger(__name__)

_FILE_NAME_PATTERN: Final = re.compile(r"\d{20}")
_MAGIC_PATTERN: Final = re.compile(
    b"|".join(re.escape(magic.to_bytes(4, "big")) for magic in (MAGIC_V1, MAGIC_V2))
)
_PAGE_BYTES: Final = 4096
DAMAGE_SCAN_BYTES: Final = (
    64 << 20
)  # bytes behind a bad place, for a record that would make it damage


@dataclass(frozen=True)
class LogRange(InputPartition):
    """Bytes of log files: name, first, behind the last."""

    ranges: tuple[tuple[str, int, int], ...]


class LogReader(DataSourceReader):
    def __init__(self, parsed_options: Options, columns: Columns, cores: int = 0) -> None:
        self._options = parsed_options
        self._columns = columns
        self._task_sizing = make_task_sizing(parsed_options, cores)
        self._mode = parsed_options[options.MODE]
        self._fail_on_data_loss = parsed_options[options.FAIL_ON_DATA_LOSS]
        wanted = parsed_options[options.SUBSCRIBE]
        self._topics = list(TRANSACTION_TOPICS) if self._is_transaction_mode else wanted

    @property
    def _is_transaction_mode(self) -> bool:
        return self._mode == options.TRANSACTIONS

    def partitions(self) -> Sequence[InputPartition]:
        files = find_log_files(Path(self._options[options.PATH]))
        used = [(str(path), estimate_used_bytes(path)) for path in files]
        total = sum(size for _, size in used)
        tasks = min(self._task_sizing.task_count(total), max(1, total // (64 << 10)))
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
            for records in read_records(
                Path(name), begin, end, fail_on_data_loss=self._fail_on_data_loss
            ):
                yield from self._batches(records)

    def _batches(self, records: Records) -> Iterator[pa.RecordBatch]:
        if self._topics:
            records = records.select(is_one_of(decode_utf8(records.topic), self._topics))
        if not self._is_transaction_mode:
            if len(records):
                yield MessageColumns(records, None, None).to_record_batch(self._columns)
            return
        topics = decode_utf8(records.topic)
        for topic in self._topics:
            some = records.select(is_one_of(topics, [topic]))
            if len(some):
                yield TransactionColumns(some, topic, None).to_record_batch(self._columns)


def find_log_files(directory: Path) -> list[Path]:
    """Raises BadOption if there is no log: `directory` is a store's, or its commitlog itself."""
    inside = directory / "commitlog"
    place = inside if inside.is_dir() else directory
    try:
        found = sorted(path for path in place.iterdir() if _FILE_NAME_PATTERN.fullmatch(path.name))
    except OSError as error:
        raise InvalidOption(f"option path: {error.strerror}: {place}") from error
    if not found:
        raise InvalidOption(
            f"option path: no commit log in {directory}; is it a broker's directory?"
        )
    return found


def estimate_used_bytes(path: Path) -> int:
    """About how much of a file was written: files have their full length from the start."""
    size = path.stat().st_size
    with path.open("rb") as file:
        low, high = 0, -(-size // _PAGE_BYTES)
        while low < high:
            middle = (low + high) // 2
            file.seek(middle * _PAGE_BYTES)
            if any(file.read(_PAGE_BYTES)):
                low = middle + 1
            else:
                high = middle
    return max(1, min(size, low * _PAGE_BYTES)) if size else 0


def read_records(path: Path, begin: int, end: int, *, fail_on_data_loss: bool) -> Iterator[Records]:
    """The records that begin in this range of bytes, some thousands at a time."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if fail_on_data_loss:
            raise DataLost(f"{path}: {error.strerror}; it may have expired meanwhile") from error
        return
    data = np.frombuffer(mapped, np.uint8)
    base = int(path.name)
    at = 0 if begin == 0 else find_next_record(mapped, base, begin, end)
    while at is not None and at < end:
        records, following = _next_records(data, base, at, end)
        if len(records):
            yield records
            at = following
            continue
        behind = (
            None
            if _is_end_of_log(mapped, at)
            else find_next_record(mapped, base, at + 1, at + DAMAGE_SCAN_BYTES)
        )
        if behind is None:
            return  # zeros, a blank record, or a torn end
        if fail_on_data_loss:
            raise DataLost(
                f"{path}: no record at log offset {base + at}, and records behind it: "
                f"`escrowmq store check` says more; failOnDataLoss=false steps over it"
            )
        log.warning("damage was stepped over path=%s from=%d to=%d", path, at, behind)
        at = behind


def _next_records(data: ByteArray, base: int, position: int, end: int) -> tuple[Records, int]:
    """Some records, and the place behind them. None: there is no record."""
    places, following = find_records(data, position, min(end, position + BLOCK_BYTES))
    if len(places) > BLOCK_ROWS:
        following = places[BLOCK_ROWS]
        places = places[:BLOCK_ROWS]
    records = Records(data, np.array(places, np.int64))
    good = records.valid_mask(base)
    if good.all():
        return records, following
    first_bad = int(np.argmin(good))
    return Records(data, records.positions[:first_bad]), places[first_bad]


def _is_end_of_log(mapped: mmap.mmap, position: int) -> bool:
    """Whether the file ends here in order: with a blank record."""
    if position + BLANK.size > len(mapped):
        return True
    remaining, magic = BLANK.unpack_from(mapped, position)
    return bool(magic == MAGIC_BLANK and remaining == len(mapped) - position)


def find_next_record(mapped: mmap.mmap, base: int, position: int, limit: int) -> int | None:
    """Where the first whole record begins, at this place or behind it, but before the limit."""
    for found in _MAGIC_PATTERN.finditer(mapped, position + 4, limit + 8):
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
