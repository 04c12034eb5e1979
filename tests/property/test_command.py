"""Both encodings give back what went in; anything else is a BrokenHeader and nothing but that."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenHeader
from escrowmq.remoting.codes import JSON, ROCKETMQ
from escrowmq.remoting.command import Command, decode_command, encode_command
from tests.support.remoting_strategies import binary_commands, commands, texts


@given(commands())
def test_json_round_trip(command: Command) -> None:
    assert decode_command(JSON, encode_command(command, JSON)) == command


@given(binary_commands())
def test_rocketmq_round_trip(command: Command) -> None:
    assert decode_command(ROCKETMQ, encode_command(command, ROCKETMQ)) == command


@given(commands())
def test_encoded_json_has_strings_only(command: Command) -> None:
    written = json.loads(encode_command(command, JSON))
    assert written.get("extFields", {}) == command.ext_fields
    assert written["opaque"] == command.opaque


scalars = st.one_of(texts, st.integers(), st.booleans(), st.none())


@given(st.dictionaries(texts, scalars, max_size=5), st.permutations(["code", "opaque", "flag"]))
def test_any_scalar_becomes_text(fields: dict[str, Any], order: list[str]) -> None:
    header = dict.fromkeys(order, 7) | {"extFields": fields, "new": [{"a": 1}]}
    command = decode_command(JSON, json.dumps(header).encode())
    expected = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in fields.items()
        if value is not None
    }
    assert command.ext_fields == expected


@given(st.sampled_from([JSON, ROCKETMQ]), st.binary(max_size=80))
def test_garbage_is_a_broken_header(serializer: int, garbage: bytes) -> None:
    decode_or_refuse(serializer, garbage)


@given(st.sampled_from([JSON, ROCKETMQ]), binary_commands(), st.data())
def test_damage_is_a_broken_header_or_another_command(
    serializer: int, command: Command, data: st.DataObject
) -> None:
    header = bytearray(encode_command(command, serializer))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    decode_or_refuse(serializer, bytes(header[: data.draw(st.integers(0, len(header)))]))
    decode_or_refuse(serializer, bytes(header))


def decode_or_refuse(serializer: int, header: bytes) -> None:
    with contextlib.suppress(BrokenHeader):
        assert encode_command(decode_command(serializer, header), serializer)
