"""Number keys without quotes, and everything that only looks like one."""

from __future__ import annotations

import json

import pytest

from escrowmq.errors import BrokenBody
from escrowmq.parsing import parse_lenient_json, quote_number_keys


@pytest.mark.parametrize(
    ("written", "quoted"),
    [
        ('{0:"a"}', '{"0":"a"}'),
        ('{0:"a",1:"b"}', '{"0":"a","1":"b"}'),
        ("{0:1,2:3,4:5}", '{"0":1,"2":3,"4":5}'),
        ("{ -7 : {\n12\t:[]} }", '{ "-7" : {\n"12"\t:[]} }'),
        ('{"a":"{0:1,2:3}"}', '{"a":"{0:1,2:3}"}'),
        ('{"a":"\\"{0:1"}', '{"a":"\\"{0:1"}'),
        ('{"a\\\\":{0:1}}', '{"a\\\\":{"0":1}}'),
        ("[1,2,3]", "[1,2,3]"),
        ('{"0":1,"1":[4,5]}', '{"0":1,"1":[4,5]}'),
        ('"never ends {0:1', '"never ends {0:1'),
        ('"ends in a backslash \\', '"ends in a backslash \\'),
        ("", ""),
    ],
)
def test_only_number_keys_are_quoted(written: str, quoted: str) -> None:
    assert quote_number_keys(written) == quoted


def test_offsets_as_a_broker_keeps_them() -> None:
    written = b'{"offsetTable":{"orders@group":{0:12,1:7},"%RETRY%group@group":{0:0}}}'
    assert parse_lenient_json(written) == {
        "offsetTable": {"orders@group": {"0": 12, "1": 7}, "%RETRY%group@group": {"0": 0}}
    }


@pytest.mark.parametrize(
    "written",
    [b"", b"{0}", b"{0:}", b"{x:1}", b'{{"topic":"t"}:1}', b'"\xff"', b"[" * 100_000],
)
def test_what_is_broken_otherwise_is_refused(written: bytes) -> None:
    with pytest.raises(BrokenBody):
        parse_lenient_json(written)


@pytest.mark.parametrize(
    "piece", ['\\"', '"', "{", "{ ", ",1", "{1", '"\\', "1:", "{1 ", '{1:"'], ids=repr
)
def test_the_cost_is_linear(piece: str) -> None:
    # Quadratic would be some 10^11 steps here, and run into the time limit of the suite.
    text = '"' * (piece == '\\"') + piece * 300_000
    assert len(quote_number_keys(text)) >= len(text)


def test_json_stays_as_it_is() -> None:
    text = json.dumps({"a": [1, -2.5e3, None, True, "x,1:"], "b": {"1": {}}})
    assert quote_number_keys(text) == text
