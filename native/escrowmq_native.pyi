"""The hot path of EscrowMQ's broker. native/README.md explains the boundary."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

INTERFACE_VERSION: Final[int]

class Half:
    queue_offset: int
    log_offset: int
    size: int
    queue_id: int
    parked_ms: int
    due_ms: int
    producer: Any
    checks: int
    unknown_answers: int
    is_stranded: bool
    is_being_decided: bool
    reason: str
    previous_offsets: tuple[int, ...]
    attempt: Any
    last_remark: str
    final_properties_bytes: int
    @property
    def topic(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def group_topic_key(self) -> tuple[str, str, bytes]: ...
    @property
    def is_unreadable(self) -> bool: ...

class HalfTotals:
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...

class HalfTable:
    def __init__(self, *, decided_max: int) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Half]: ...
    def new_half(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        due_ms: int,
        producer: Any,
    ) -> Half: ...
    def reserve(self, half: Half) -> bool: ...
    def release(self, half: Half) -> None: ...
    def add(self, half: Half) -> None: ...
    def remove(self, half: Half) -> None: ...
    def close(self, half: Half) -> None: ...
    def remember_decided(
        self, group: str, topic: str, key: bytes, queue_offset: int, log_offset: int
    ) -> None: ...
    def strand(self, half: Half) -> None: ...
    def find(self, queue_offset: int) -> Half | None: ...
    def undecided(self, queue_offsets: array[int]) -> list[int]: ...
    def find_by_key(self, group: str, topic: str, key: bytes) -> Half | None: ...
    def find_duplicate(self, group: str, topic: str, key: bytes) -> tuple[int, int] | None: ...
    def oldest(self) -> Half | None: ...
    def group_totals(self, group: str) -> HalfTotals: ...
    @property
    def total(self) -> HalfTotals: ...
    @property
    def count_by_topic(self) -> dict[str, int]: ...
    @property
    def stranded_count(self) -> int: ...

class PlainRequests:
    def __init__(
        self,
        table: HalfTable,
        queue_counts: dict[str, int],
        *,
        store_host: bytes,
        has_crc: bool,
        added_properties: bytes,
        send_tail: bytes,
        tail_bytes: int,
        plan_pull: Callable[..., Any],
        read_log: Callable[[int, int, bool], tuple[int, bytes]],
        commit_offset: Callable[[str, str, int, int], None],
    ) -> None: ...
    def configure(
        self,
        *,
        message_bytes: int,
        record_bytes: int,
        half_bytes: int,
        open_max: int,
        open_bytes: int,
        group_open_max: int,
        group_open_bytes: int,
        immunity_ms: Callable[[str, str], int] | None,
    ) -> None: ...
    def remember_append(self, log_offset: int, data: bytes) -> None: ...
    def read(
        self,
        chunks: list[tuple[Any, bytes, bytes, bytes]],
        now_ms: int,
        requests_max: int,
        pull_version: tuple[int, int] | None,
    ) -> Batch: ...

class Batch:
    def __len__(self) -> int: ...
    @property
    def leftovers(self) -> list[tuple[int, bytes, bool]]: ...
    @property
    def queues(self) -> list[tuple[str, int]]: ...
    def pull_responses(self) -> list[tuple[int, memoryview]]: ...
    def pull_errors(self) -> list[BaseException]: ...
    def deliveries(self) -> list[tuple[int, str, str, int, int, int]]: ...
    def encode(
        self, log_end: int, segment_bytes: int, stored_ms: int, next_offsets: Sequence[int]
    ) -> None: ...
    @property
    def pieces(self) -> list[tuple[int, memoryview]]: ...
    @property
    def end(self) -> int: ...
    @property
    def last_record_offset(self) -> int: ...
    @property
    def record_count(self) -> int: ...
    @property
    def entries(self) -> list[bytes]: ...
    def arrivals(self, queue: int) -> list[tuple[int, bytes]]: ...
    def take_keys(self) -> KeyBlock: ...
    def apply(self) -> Applied: ...
    def cancel(self) -> None: ...
    def responses(self) -> list[tuple[int, bytes]]: ...
    def requests(
        self,
    ) -> list[tuple[int, int, int, bool, tuple[int, int, int], bytes | None]]: ...

class Applied:
    send_count: int
    end_count: int
    due: list[tuple[int, bytes]]
    last_half_offset: int
    half_count: int
    first_op_offset: int
    ended: bytes
    committed: bytes
    rolled_back: bytes
    outcomes: list[tuple[str, bool, int, int]]
    sizes: list[tuple[str, bool, int, int]]

class KeyBlock:
    @property
    def stored_ms(self) -> int: ...
    @property
    def hashes(self) -> bytes: ...
    @property
    def log_offsets(self) -> bytes: ...
    def __len__(self) -> int: ...
    def find(self, hash_value: int) -> list[int]: ...

class LinkedEntries:
    entries: bytes
    words: bytes
    sum_changes: list[tuple[int, int]]
    new_slots: int

def link_entries(
    hashes: bytes,
    log_offsets: bytes,
    stored_ms: bytes,
    *,
    begin_ms: int,
    slot_count: int,
    first: int,
    slots: bytes,
) -> LinkedEntries: ...
def records_are_right(
    data: bytes,
    data_begin: int,
    ranges: Sequence[tuple[int, int, int]],
    magic: int,
    topic_field: bytes,
    queue_id: int,
) -> bool: ...
def plan_words(words: bytes, page_bytes: int, dense_bytes: int) -> list[tuple[int, int, bytes]]: ...
def merge_words(content: bytearray, begin: int, words: bytes) -> None: ...
