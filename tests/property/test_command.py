"""Both header encodings decode what they encode; other bytes raise BrokenHeader only."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenHeader
from escrowmq.remoting.codes import JSON, ROCKETMQ
from escrowmq.remoting.command import Command, decode_command, encode_command
from tests.property.damage import damaged
from tests.support.remoting_strategies import binary_commands, commands, texts


@given(commands())
def test_a_command_survives_a_round_trip_in_json(command: Command) -> None:
    assert decode_command(JSON, encode_command(command, JSON)) == command


@given(binary_commands())
def test_a_command_survives_a_round_trip_in_the_rocketmq_encoding(command: Command) -> None:
    assert decode_command(ROCKETMQ, encode_command(command, ROCKETMQ)) == command


@given(commands())
def test_the_values_of_ext_fields_are_encoded_as_strings(command: Command) -> None:
    decoded_json = json.loads(encode_command(command, JSON))
    assert decoded_json.get("extFields", {}) == command.ext_fields
    assert decoded_json["opaque"] == command.opaque


scalars = st.one_of(texts, st.integers(), st.booleans(), st.none())


@given(st.dictionaries(texts, scalars, max_size=5), st.permutations(["code", "opaque", "flag"]))
def test_any_scalar_in_ext_fields_is_decoded_as_text(
    fields: dict[str, Any], order: list[str]
) -> None:
    header = dict.fromkeys(order, 7) | {"extFields": fields, "new": [{"a": 1}]}
    command = decode_command(JSON, json.dumps(header).encode())
    expected = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in fields.items()
        if value is not None
    }
    assert command.ext_fields == expected


@given(st.sampled_from([JSON, ROCKETMQ]), st.binary(max_size=80))
def test_garbage_raises_broken_header_or_is_a_command(serializer: int, garbage: bytes) -> None:
    decode_or_refuse(serializer, garbage)


@given(st.sampled_from([JSON, ROCKETMQ]), binary_commands(), st.data())
def test_a_damaged_header_raises_broken_header_or_is_another_command(
    serializer: int, command: Command, data: st.DataObject
) -> None:
    header = data.draw(damaged(encode_command(command, serializer)))
    decode_or_refuse(serializer, header[: data.draw(st.integers(0, len(header)))])
    decode_or_refuse(serializer, header)


def decode_or_refuse(serializer: int, header: bytes) -> None:
    """Assert that the decoder raises BrokenHeader or returns a command that can be encoded."""
    with contextlib.suppress(BrokenHeader):
        assert encode_command(decode_command(serializer, header), serializer)
