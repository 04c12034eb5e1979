"""A batch comes back as it was, and damage to it is a BrokenBody or another batch."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message.batch import BatchItem, decode_batch, encode_batch
from tests.property.wire_strategies import bodies, int32

items = st.lists(st.builds(BatchItem, int32, bodies, bodies), max_size=5)


@given(items)
def test_round_trip(batch: list[BatchItem]) -> None:
    assert decode_batch(encode_batch(batch)) == batch


@given(items, items)
def test_batches_can_be_put_one_behind_the_other(
    one: list[BatchItem], two: list[BatchItem]
) -> None:
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
