"""A start believes only what a client could not have sent: a stranger's records decide nothing.

Clients choose the key, the group, the body and the flags of their messages. Before brokers removed
the transaction type of plain sends, a client could also store a message that looks like a final.
Such records may be in any log, and under RocketMQ they can be written to this day.
"""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.message import names
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import NewRecord, StoredRecord
from tests.support.escrows import COMMIT, CURSOR_GROUP, EscrowBench, HalfPosition
from tests.support.rocketmq_directories import RocketMQDirectory, record_position
from tests.support.stores import NOW_MS, sample

STRANGER: Final = encode_host("10.9.9.9", 9)


def forged_final(half: StoredRecord, prepared_offset: int, **changes: object) -> NewRecord:
    """Return a record of a stranger that claims to be the final of a half."""
    fields: dict[str, object] = {
        "topic": "T",
        "queue_id": 0,
        "body": b"forged",
        "properties": half.properties,
        "sys_flag": 8,
        "born_ms": half.born_ms,
        "born_host": STRANGER,
        "prepared_offset": prepared_offset,
        **changes,
    }
    return NewRecord(**fields)  # type: ignore[arg-type]  # the fields of a record by name


def assert_open(bench: EscrowBench, position: HalfPosition, body: bytes = b"k") -> None:
    """Assert that a half is open, and that its own message is delivered when it is committed."""
    assert bench.state(position) == "open"
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies().count(body) == 1


@pytest.mark.parametrize("is_last", [True, False], ids=["at the end of the log", "before it"])
@pytest.mark.parametrize("at_log_begin", [True, False], ids=["log offset 0", "another offset"])
@pytest.mark.parametrize("with_snapshot", [True, False], ids=["snapshot", "no snapshot"])
@pytest.mark.parametrize("names_half", [True, False], ids=["names the half", "names nothing"])
def test_a_forged_final_decides_nothing(
    names_half: bool, with_snapshot: bool, at_log_begin: bool, is_last: bool
) -> None:
    bench = EscrowBench()
    if not at_log_begin:
        bench.park("first")
    position = bench.park("k")
    bench.save_snapshot()
    half = bench.store.record_at(position.log_offset)
    bench.store.append([forged_final(half, half.log_offset if names_half else 0)], now_ms=NOW_MS)
    if not is_last:
        bench.store.append([sample(topic="T", queue_id=1)], now_ms=NOW_MS)
    bench = bench.killed(with_snapshot=with_snapshot)
    assert_open(bench, position)


FORGERIES: Final = st.fixed_dictionaries(
    {},
    optional={
        "body": st.sampled_from([b"k", b"forged", b""]),
        "born_host": st.just(STRANGER),
        "queue_id": st.sampled_from([0, 1]),
        "topic": st.sampled_from(["T", names.SCHEDULE_TOPIC, "%RETRY%g"]),
        "prepared_offset": st.integers(0, 1_000),
        "sys_flag": st.sampled_from([8, 8 | 0x100, 12, 4]),
    },
)


@given(st.lists(FORGERIES, min_size=1, max_size=4), st.booleans())
def test_no_record_of_a_stranger_decides_a_half(
    forgeries: list[dict[str, object]], with_snapshot: bool
) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.save_snapshot()
    half = bench.store.record_at(position.log_offset)
    for changes in forgeries:
        prepared_offset = changes.pop("prepared_offset", half.log_offset)
        assert isinstance(prepared_offset, int)
        bench.store.append([forged_final(half, prepared_offset, **changes)], now_ms=NOW_MS)
    bench = bench.killed(with_snapshot=with_snapshot)
    assert bench.state(position) == "open"
    assert bench.end(position, COMMIT).code == 0


def test_a_forged_final_in_a_directory_of_rocketmq_decides_nothing() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    rocketmq.append(forged_final(half, half.log_offset))
    rocketmq.append(forged_final(half, 0))
    rocketmq.append(sample(topic="T", queue_id=1))
    assert_open(rocketmq.opened(), record_position(half))


def test_a_forged_final_of_an_older_copy_decides_nothing() -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    second = rocketmq.put_back(first)
    rocketmq.append(forged_final(first, first.log_offset))
    assert_open(rocketmq.opened(half_cursor=1), record_position(second))


def test_a_final_that_rocketmq_made_of_an_older_copy_commits_the_newest() -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    second = rocketmq.put_back(first)
    rocketmq.deliver(first)
    bench = rocketmq.opened(half_cursor=1)
    assert bench.state(record_position(second)) == "committed"
    assert bench.bodies() == [b"k"]


def test_a_delayed_final_of_rocketmq_commits_its_half() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k", DELAY="1")
    final = NewRecord(
        names.SCHEDULE_TOPIC,
        0,
        bytes(half.body),
        half.properties,
        sys_flag=8,
        born_ms=half.born_ms,
        born_host=half.born_host,
        prepared_offset=half.log_offset,
    )
    rocketmq.append(final)
    rocketmq.append(sample(topic="T", queue_id=1))
    assert rocketmq.opened().state(record_position(half)) == "committed"


def strangers_half(key: str = "k", **changes: object) -> NewRecord:
    """Return a half that a stranger parked with the key and the group of another client's half."""
    properties = {"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": key}
    properties |= {"REAL_TOPIC": "T", "REAL_QID": "0"}
    fields = {"body": b"forged", "born_host": STRANGER, **changes}
    return NewRecord(
        topic=names.HALF_TOPIC,
        queue_id=0,
        properties=encode_properties(properties),
        **fields,  # type: ignore[arg-type]  # the fields of a record by name
    )


@pytest.mark.parametrize("body", [b"k", b"forged"])
@pytest.mark.parametrize("is_first", [True, False], ids=["before the real one", "after it"])
def test_the_end_of_a_strangers_half_decides_no_other(is_first: bool, body: bytes) -> None:
    rocketmq = RocketMQDirectory()
    forgery = strangers_half(body=body)
    if is_first:
        forged = rocketmq.append(forgery)
        half = rocketmq.half("k")
    else:
        half = rocketmq.half("k")
        forged = rocketmq.append(forgery)
    rocketmq.op(forged)
    bench = rocketmq.opened()
    assert bench.state(record_position(forged)) == "rolled_back"
    assert_open(bench, record_position(half))


@pytest.mark.parametrize("is_first", [True, False], ids=["before the real one", "after it"])
def test_an_open_half_of_a_stranger_replaces_no_other(is_first: bool) -> None:
    rocketmq = RocketMQDirectory()
    records = [strangers_half(), None] if is_first else [None, strangers_half()]
    stored = [
        rocketmq.half("k") if record is None else rocketmq.append(record) for record in records
    ]
    bench = rocketmq.opened()
    positions = [record_position(record) for record in stored]
    assert [bench.state(position) for position in positions] == ["open", "open"]
    for _ in range(2):
        bench = bench.killed(with_snapshot=False)
        assert [bench.state(position) for position in positions] == ["open", "open"]
    assert [bench.end(position, COMMIT).code for position in positions] == [0, 0]
    assert sorted(bench.bodies()) == [b"forged", b"k"]


def test_a_discarded_half_of_a_stranger_strands_no_other() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    rocketmq.discard(rocketmq.append(strangers_half()))
    bench = rocketmq.opened()
    assert bench.state(record_position(half)) == "open"


# --- the cursor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_snapshot", [True, False], ids=["snapshot", "no snapshot"])
@pytest.mark.parametrize("cursor", [1, 20, 1_000, 1 << 62])
def test_a_cursor_without_ops_decides_nothing(cursor: int, with_snapshot: bool) -> None:
    bench = EscrowBench()
    positions = [bench.park(f"k{number}") for number in range(20)]
    bench.save_snapshot()
    for topic in (names.HALF_TOPIC, names.OP_TOPIC):
        bench.broker.offsets.commit(topic, CURSOR_GROUP, 0, cursor)
    bench.broker.save()
    bench = bench.killed(with_snapshot=with_snapshot)
    assert [bench.state(position) for position in positions] == ["open"] * 20
    assert [bench.end(position, COMMIT).code for position in positions] == [0] * 20
    assert len(bench.bodies()) == 20
