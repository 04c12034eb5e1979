"""Read the commit-log files of a broker from disk, of EscrowMQ or RocketMQ, running or not.

The driver splits files into ranges of bytes without reading them. A record belongs to the range in
which it begins. The task that reads a range follows the records from the begin of the file, each of
which says where the next one begins, and returns those of its range. Records are never searched
for: the body of a message may contain bytes that look exactly like a record.

Behind the last record of the log there are zeros, or an incomplete write of a crash. So a position
without a record is the end of the log, unless records follow in the same file or another file
follows. Then it is damage, which fails the query or, with failOnDataLoss=false, is skipped: up to
the next record if the lengths in the damaged one agree, and up to the end of the range otherwise.
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
    RECORD_BYTES_MIN,
    LogOffset,
    decode_record,
    read_claims,
)
from escrowmq.spark import options
from escrowmq.spark.columns import decode_utf8, is_one_of, message_batches
from escrowmq.spark.options import Options
from escrowmq.spark.planning import make_task_sizing
from escrowmq.spark.queues import TRANSACTION_TOPICS
from escrowmq.spark.range_pull import BLOCK_BYTES, BLOCK_ROWS
from escrowmq.spark.records import ByteArray, Records, find_records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns

log = logging.getLogger(__name__)

_FILE_NAME_PATTERN: Final = re.compile(r"\d{20}")
_PAGE_BYTES: Final = 4096
_MIN_TASK_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class LogRange(InputPartition):
    """What one task reads: name of a file, first byte, end."""

    ranges: tuple[tuple[str, int, int], ...]


class LogReader(DataSourceReader):
    """Reads the log files of one broker in a batch."""

    def __init__(self, parsed_options: Options, columns: Columns, cores: int = 0) -> None:
        self._options = parsed_options
        self._columns = columns
        self._task_sizing = make_task_sizing(parsed_options, cores)
        self._mode = parsed_options[options.MODE]
        self._fail_on_data_loss = parsed_options[options.FAIL_ON_DATA_LOSS]
        # Empty: all topics.
        self._topics: list[str] = parsed_options[options.SUBSCRIBE]
        if self._is_transaction_mode:
            self._topics = list(TRANSACTION_TOPICS)

    @property
    def _is_transaction_mode(self) -> bool:
        return self._mode == options.TRANSACTIONS

    def partitions(self) -> Sequence[InputPartition]:
        files = find_log_files(Path(self._options[options.PATH]))
        used_bytes = [(str(path), estimate_used_bytes(path)) for path in files]
        total_bytes = sum(size for _, size in used_bytes)
        task_count = min(
            self._task_sizing.task_count(total_bytes), max(1, total_bytes // _MIN_TASK_BYTES)
        )
        task_bytes = -(-total_bytes // task_count)
        tasks: list[list[tuple[str, int, int]]] = [[]]
        free_bytes = task_bytes
        for name, size in used_bytes:
            begin = 0
            while begin < size:
                end = begin + min(free_bytes, size - begin)
                # The used size is an estimate, so the last range of a file extends to its end.
                range_end = os.path.getsize(name) if end == size else end
                tasks[-1].append((name, begin, range_end))
                free_bytes -= end - begin
                begin = end
                if not free_bytes:
                    tasks.append([])
                    free_bytes = task_bytes
        return [LogRange(tuple(task)) for task in tasks if task] or [LogRange(())]

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
                yield from message_batches(records, None, None, self._columns)
            return
        topics = decode_utf8(records.topic)
        for topic in self._topics:
            of_topic = records.select(is_one_of(topics, [topic]))
            if len(of_topic):
                yield TransactionColumns(of_topic, topic, None).to_record_batch(self._columns)


def find_log_files(directory: Path) -> list[Path]:
    """Return the log files of a broker's directory, or of its directory `commitlog`.

    Raises InvalidOption if there are none.
    """
    subdirectory = directory / "commitlog"
    log_directory = subdirectory if subdirectory.is_dir() else directory
    try:
        files = sorted(
            path for path in log_directory.iterdir() if _FILE_NAME_PATTERN.fullmatch(path.name)
        )
    except OSError as error:
        raise InvalidOption(f"option path: {error.strerror}: {log_directory}") from error
    if not files:
        raise InvalidOption(
            f"option path: no commit log in {directory}; is it a broker's directory?"
        )
    return files


def estimate_used_bytes(path: Path) -> int:
    """Estimate how much of a file was written, with a binary search for the first empty page.

    Files have their full length from the start; the unused part is zeros.
    """
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
    """Yield the records that begin in this range of bytes, at most BLOCK_ROWS at a time.

    Raises DataLost if the file is gone, or damaged in this range, if `fail_on_data_loss`.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if fail_on_data_loss:
            raise DataLost(f"{path}: {error.strerror}; it may have expired meanwhile") from error
        return
    data = np.frombuffer(mapped, np.uint8)
    base = int(path.name)  # the log offset of the first byte
    position = 0
    while position < end:
        is_in_range = position >= begin
        records, next_position = _next_records(data, base, position, end if is_in_range else begin)
        if len(records):
            if is_in_range:
                yield records
            position = next_position
            continue
        if _is_end_of_log(mapped, position):
            return
        next_record, is_damage = _next_after_damage(mapped, base, position)
        if not is_damage and not _has_next_file(path, len(mapped)):
            return  # zeros, or a torn end
        if fail_on_data_loss and is_in_range:
            raise DataLost(
                f"{path}: damage at log offset {base + position}, with records behind it: "
                f"`escrowmq store check` says more; failOnDataLoss=false skips it"
            )
        log.warning("skipped damage path=%s from=%d to=%d", path, position, next_record or end)
        if next_record is None:
            return
        position = next_record


def _next_records(data: ByteArray, base: int, position: int, end: int) -> tuple[Records, int]:
    """Return valid records from a position on, and the position behind them.

    There are none if there is no valid record at the position itself.
    """
    positions, next_position = find_records(data, position, min(end, position + BLOCK_BYTES))
    if len(positions) > BLOCK_ROWS:
        next_position = positions[BLOCK_ROWS]
        positions = positions[:BLOCK_ROWS]
    records = Records(data, np.array(positions, np.int64))
    is_valid = records.valid_mask(base)
    if is_valid.all():
        return records, next_position
    first_invalid = int(np.argmin(is_valid))
    return Records(data, records.positions[:first_invalid]), positions[first_invalid]


def _is_end_of_log(mapped: mmap.mmap, position: int) -> bool:
    """Return whether the file ends at this position as it should: with a blank record."""
    if position + BLANK.size > len(mapped):
        return True
    remaining, magic = BLANK.unpack_from(mapped, position)
    return bool(magic == MAGIC_BLANK and remaining == len(mapped) - position)


def _next_after_damage(mapped: mmap.mmap, base: int, position: int) -> tuple[int | None, bool]:
    """Return where the next record begins behind invalid bytes, and whether any record follows.

    The first is None if it is uncertain.
    """
    claims = read_claims(lambda begin, end: mapped[position + begin : position + end])
    if claims is None:
        return None, False
    ends = {position + size for size in (claims.size, claims.parts_size) if size > 0}
    valid = [end for end in ends if _is_record(mapped, base, end)]
    is_certain = claims.size == claims.parts_size and claims.wrong_bits(base + position) <= 1
    return (valid[0] if valid and is_certain else None), bool(valid)


def _is_record(mapped: mmap.mmap, base: int, begin: int) -> bool:
    size = int.from_bytes(mapped[begin : begin + 4], "big", signed=True)
    try:
        decode_record(mapped[begin : begin + max(0, size)], 0, LogOffset(base + begin))
    except CorruptRecord:
        return False
    return True


def _has_next_file(path: Path, file_bytes: int) -> bool:
    """Return whether the next segment has a record, so that this one was complete."""
    next_file = path.with_name(f"{int(path.name) + file_bytes:020d}")
    try:
        with next_file.open("rb") as file:
            return any(file.read(RECORD_BYTES_MIN))
    except OSError:
        return False
