"""A batch is decoded as it was encoded; a damaged batch raises BrokenBody or is another batch."""

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
from tests.property.damage import damaged
from tests.support.remoting_strategies import bodies, int32

items = st.lists(st.builds(BatchItem, int32, bodies, bodies), max_size=5)
key_bytes = st.sampled_from(b"09AZaz")


def properties_with_unique_key(length: int) -> st.SearchStrategy[bytes]:
    """Return a strategy for properties that have only a unique key of this length."""
    keys = st.lists(key_bytes, min_size=length, max_size=length).map(bytes)
    return keys.map(lambda key: UNIQUE_KEY_PREFIX + key + b"\x02")


bulk_items = st.integers(1, 40).flatmap(
    lambda length: st.lists(
        st.builds(BatchItem, int32, bodies, properties_with_unique_key(length)),
        min_size=1,
        max_size=6,
    )
)


def items_of(run: RecordRun) -> list[BatchItem]:
    return [BatchItem(record.flag, record.body, record.properties) for record in run.records()]


@given(items)
def test_an_encoded_batch_is_decoded_unchanged(batch: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(items, items)
def test_batches_can_be_concatenated(first: list[BatchItem], second: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(first) + encode_batch(second)) == first + second


@given(items, st.data())
def test_a_batch_that_ends_inside_a_message_is_refused(
    batch: list[BatchItem], data: st.DataObject
) -> None:
    encoded = encode_batch(batch)
    ends = {len(encode_batch(batch[:count])) for count in range(len(batch) + 1)}
    length = data.draw(st.integers(0, len(encoded)))
    try:
        assert decode_batch(encoded[:length]) == batch[: len(decode_batch(encoded[:length]))]
        assert length in ends
    except BrokenBody:
        assert length not in ends


@given(items.filter(bool), st.data())
def test_a_damaged_batch_is_refused_or_is_another_batch(
    batch: list[BatchItem], data: st.DataObject
) -> None:
    content = data.draw(damaged(encode_batch(batch)))
    with contextlib.suppress(BrokenBody):
        assert len(encode_batch(decode_batch(content))) == len(content)


@given(bulk_items)
def test_a_bulk_batch_is_decoded_into_columns_with_the_same_items(batch: list[BatchItem]) -> None:
    bulk = decode_bulk_batch(encode_batch(batch))
    assert bulk is not None
    assert items_of(bulk.to_run("T", 0, b"", 0, 0, b"\0" * 8, 0)) == batch


@given(bulk_items, items.filter(bool), st.data())
def test_a_batch_with_other_items_is_not_decoded_as_a_bulk_batch(
    bulk: list[BatchItem], others: list[BatchItem], data: st.DataObject
) -> None:
    mixed = data.draw(st.permutations(bulk + others))
    assert decode_bulk_batch(encode_batch(mixed)) is None


@given(bulk_items, st.data())
def test_a_damaged_bulk_batch_is_decoded_like_any_batch_or_not_at_all(
    batch: list[BatchItem], data: st.DataObject
) -> None:
    content = data.draw(damaged(encode_batch(batch)))
    truncated = content[: data.draw(st.integers(1, len(content)))]
    bulk = decode_bulk_batch(truncated)
    if bulk is not None:
        assert items_of(bulk.to_run("T", 0, b"", 0, 0, b"\0" * 8, 0)) == decode_batch(truncated)
