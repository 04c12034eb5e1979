"""A batch comes back as it was, and damage to it is a BrokenBody or another batch."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message.batch import (
    UNIQUE_KEY_PREFIX,
    BatchItem,
    RecordRun,
    decode_batch,
    decode_bulk_batch,
    encode_batch,
)
from tests.support.remoting_strategies import bodies, int32

items = st.lists(st.builds(BatchItem, int32, bodies, bodies), max_size=5)
letters = st.sampled_from(b"09AZaz")


def lone_keys(length: int) -> st.SearchStrategy[bytes]:
    keys = st.lists(letters, min_size=length, max_size=length).map(bytes)
    return keys.map(lambda key: UNIQUE_KEY_PREFIX + key + b"\x02")


bulk_items = st.integers(1, 40).flatmap(
    lambda length: st.lists(
        st.builds(BatchItem, int32, bodies, lone_keys(length)), min_size=1, max_size=6
    )
)


def items_of(run: RecordRun) -> list[BatchItem]:
    return [BatchItem(one.flag, one.body, one.properties) for one in run.records()]


@given(items)
def test_round_trip(batch: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(items, items)
def test_batches_can_be_concatenated(one: list[BatchItem], two: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(one) + encode_batch(two)) == one + two


@given(items, st.data())
def test_a_batch_that_ends_inside_a_message_is_refused(
    batch: list[BatchItem], data: st.DataObject
) -> None:
    whole = encode_batch(batch)
    ends = {len(encode_batch(batch[:count])) for count in range(len(batch) + 1)}
    length = data.draw(st.integers(0, len(whole)))
    try:
        assert decode_batch(whole[:length]) == batch[: len(decode_batch(whole[:length]))]
        assert length in ends
    except BrokenBody:
        assert length not in ends


@given(items.filter(bool), st.data())
def test_damage_is_refused_or_is_another_batch(batch: list[BatchItem], data: st.DataObject) -> None:
    damaged = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BrokenBody):
        assert len(encode_batch(decode_batch(bytes(damaged)))) == len(damaged)


@given(bulk_items)
def test_a_bulk_batch_is_the_same_in_columns(batch: list[BatchItem]) -> None:
    found = decode_bulk_batch(encode_batch(batch))
    assert found is not None
    assert items_of(found.to_run("T", 0, b"", 0, 0, b"\0" * 8, 0)) == batch


@given(bulk_items, items.filter(bool), st.data())
def test_another_batch_is_not_taken_for_a_bulk_batch(
    bulk: list[BatchItem], others: list[BatchItem], data: st.DataObject
) -> None:
    mixed = data.draw(st.permutations(bulk + others))
    assert decode_bulk_batch(encode_batch(mixed)) is None


@given(bulk_items, st.data())
def test_a_damaged_bulk_batch_is_decoded_like_others_or_not_at_all(
    batch: list[BatchItem], data: st.DataObject
) -> None:
    damaged = bytearray(encode_batch(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    found = decode_bulk_batch(cut)
    if found is not None:
        assert items_of(found.to_run("T", 0, b"", 0, 0, b"\0" * 8, 0)) == decode_batch(cut)
