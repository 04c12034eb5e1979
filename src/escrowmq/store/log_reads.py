"""How records are read from the log: from memory if they are new, otherwise from the disk, checked.

    RecentAppends   the last appended bytes, which most pulls want
    check_records   neighbouring records of one queue that were read from the disk for a pull

What was appended a moment ago is in memory and is sent to consumers as it is. What is read from the
disk is checked before it is sent: a record must be the one that its queue entry names, and its
checksums must be right. A bad sector, a file that was cut short and a flipped bit are all found
here, and cost the message that they hit.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import (
    BORN_HOST_IPV6,
    CRC_MASK,
    RECORD_BYTES_MIN,
    STORE_HOST_IPV6,
    LogOffset,
    crc32,
    decode_record,
    encode_topic,
)
from escrowmq.store.disk import BytesLike

RECENT_BYTES_MAX: Final = 8 << 20
# Records of a queue lie between those of others. To read a gap takes less time than another read.
_GAP_BYTES_MAX: Final = 16 << 10
_READ_BYTES_MAX: Final = 512 << 10
_RECENT_APPENDS_MAX: Final = 8192


class RecentAppends:
    """The last appended bytes of a log, by log offset."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._begins: list[int] = []
        self._appends: list[memoryview] = []
        self._bytes = 0

    def add(self, begin: int, data: BytesLike) -> None:
        """Add bytes that were appended at a log offset. Offsets ascend from call to call."""
        self._begins.append(begin)
        self._appends.append(memoryview(data))
        self._bytes += len(data)
        if self._bytes > self._bytes_max or len(self._begins) > _RECENT_APPENDS_MAX:
            self._drop_oldest()

    def find(self, begin: int, end: int) -> list[memoryview] | None:
        """Return the bytes between two log offsets, not copied; None if they are not all here."""
        index = bisect_right(self._begins, begin) - 1
        if index < 0:
            return None
        slices: list[memoryview] = []
        while begin < end:
            if index == len(self._begins):
                return None
            position = begin - self._begins[index]
            part = self._appends[index][position : position + end - begin]
            if position < 0 or not part:
                return None
            slices.append(part)
            begin += len(part)
            index += 1
        return slices

    def find_append(self, log_offset: int) -> tuple[memoryview, int] | None:
        """Return the append with a record, and the position of the record in it; None if gone."""
        index = bisect_right(self._begins, log_offset) - 1
        if index < 0:
            return None
        data, position = self._appends[index], log_offset - self._begins[index]
        return (data, position) if position < len(data) else None

    def clear(self) -> None:
        self._begins.clear()
        self._appends.clear()
        self._bytes = 0

    def _drop_oldest(self) -> None:
        """Drop a quarter at once: to shift the lists for every append would cost more."""
        count, dropped_bytes = 0, 0
        while count < len(self._begins) and (
            dropped_bytes < self._bytes_max // 4 and count < _RECENT_APPENDS_MAX // 4
        ):
            dropped_bytes += len(self._appends[count])
            count += 1
        del self._begins[:count], self._appends[:count]
        self._bytes -= dropped_bytes


# The head of a record whose hosts are IPv4 addresses: size, magic, body CRC, queue id, queue
# offset, log offset, sysFlag, body length.
_HEAD: Final = struct.Struct(">iIIi4xqqi44xi")
_HEAD_BYTES: Final = _HEAD.size
_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_SEAL_BYTES: Final = 20  # of the record CRC: `__CRC32#`, a separator, ten digits, a separator
_SEAL_NAME: Final = b"__CRC32#\x01"


LogRange = tuple[int, int, int]  # begin and end in the log, queue offset of the first record


def check_records(
    data: bytes,
    data_begin: int,
    ranges: Sequence[LogRange],
    topic: str,
    queue_id: int,
    native: ModuleType | None = None,
) -> None:
    """Check ranges of neighbouring records of a queue in data that begins at a log offset.

    Raises CorruptRecord at the first record that is not what it should be. This is a fast version
    of `check_record` for all of them: a pull of old messages runs it for each message. The native
    module has a faster one, which accepts no more.
    """
    expected_magic, topic_field = encode_topic(topic)
    if native is not None and native.records_are_right(
        data, data_begin, ranges, expected_magic, topic_field, queue_id
    ):
        return
    unpack, topic_bytes = _HEAD.unpack_from, len(topic_field)
    view = memoryview(data)  # for long slices; a short slice of bytes is compared faster
    for begin, range_end, queue_offset in ranges:
        position, end = begin - data_begin, range_end - data_begin
        while position < end:
            if end - position < RECORD_BYTES_MIN:
                raise CorruptRecord(data_begin + position, "the log ends inside this record")
            size, magic, body_crc, own_queue, own_queue_offset, own_offset, sys_flag, body_bytes = (
                unpack(data, position)
            )
            record_end = position + size
            body_begin = position + _HEAD_BYTES
            topic_begin = body_begin + body_bytes
            if (
                sys_flag & _HOST_BITS
                or magic != expected_magic
                or own_offset != data_begin + position
                or own_queue_offset != queue_offset
                or own_queue != queue_id
                or body_bytes < 0
                or not topic_begin + topic_bytes + 2 <= record_end <= end
                or data[topic_begin : topic_begin + topic_bytes] != topic_field
                or not _has_right_checksum(
                    data, view, position, record_end, body_begin, topic_begin, body_crc
                )
            ):
                log_offset = data_begin + position
                size = check_record(view[:end], position, log_offset, queue_offset, topic, queue_id)
            position += size
            queue_offset += 1


def group_ranges(ranges: Sequence[LogRange], segment_bytes: int) -> Iterator[list[LogRange]]:
    """Yield ranges that are near each other in one segment: one read fetches all of them."""
    group: list[LogRange] = []
    for log_range in ranges:
        if group and not (
            0 <= log_range[0] - group[-1][1] <= _GAP_BYTES_MAX
            and log_range[1] - group[0][0] <= _READ_BYTES_MAX
            and log_range[0] // segment_bytes == group[0][0] // segment_bytes
        ):
            yield group
            group = []
        group.append(log_range)
    if group:
        yield group


def _has_right_checksum(
    data: bytes,
    view: memoryview,
    begin: int,
    end: int,
    body_begin: int,
    body_end: int,
    body_crc: int,
) -> bool:
    seal = data[end - _SEAL_BYTES : end]
    if seal.startswith(_SEAL_NAME):
        crc = crc32(view[begin : end - _SEAL_BYTES]) & CRC_MASK
        return seal[9:] == (b"%010d" % crc)[::-1] + b"\x02"
    if seal[9:19].isdigit():
        return False  # perhaps the name is damaged; the plain check finds out
    return crc32(view[body_begin:body_end]) & CRC_MASK == body_crc


def check_record(
    data: memoryview, position: int, log_offset: int, queue_offset: int, topic: str, queue_id: int
) -> int:
    """Check one record and return its size. Raises CorruptRecord. This is the specification."""
    record = decode_record(data, position, LogOffset(log_offset))
    if (record.topic, record.queue_id, record.queue_offset) != (topic, queue_id, queue_offset):
        raise CorruptRecord(
            log_offset,
            f"it is message {record.queue_offset} of queue {record.queue_id} of {record.topic}, "
            f"not message {queue_offset} of queue {queue_id} of {topic}",
        )
    return record.size
