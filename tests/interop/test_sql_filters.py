"""Apache RocketMQ and we match the same messages, for every SQL92 expression of our unit tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.interop.apache import ApacheRocketMQ
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.records import decode_records
from tests.interop.remoting import Client
from tests.unit.consume.sql92.test_filter import DOES_NOT, MATCHES, MESSAGE, REFUSED, lines

pytestmark = [pytest.mark.slow, pytest.mark.apache, pytest.mark.nightly]

PROPERTIES = [  # of one message each, many of them hard to parse as numbers
    MESSAGE,
    {},
    {"a": "5", "missing": "5"},
    {"a": "x", "missing": "x", "word": "5"},
    {"a": "5.0", "half": "NaN", "word": "", "yes": "True", "missing": "2"},
    {"a": " 5", "b": "+3", "one": "0x1p3", "half": "1d", "word": "it's", "spaced": "-0.0"},
    {"a": "-5", "long": "2147483648", "half": ".5f", "nan": "-Infinity", "word": "1e400"},
    {"a": "\u0665", "one": "1_0", "half": "5.", "nan": "Infinity", "spaced": "\t9"},
]
ADDITIONAL = """
    a < b
    one > half
    spaced < half
    half = 1.0
    long > 2147483647
    long > 2147483648
    word = a
    missing <> a
    a <> missing
    nan < 0.5
    'x' = a
    FALSE OR a = 5
    missing IS NULL OR word > 1
    (a = 5) = (missing = 5)
    a IN ('5', '5.0', 'x') AND NOT (word CONTAINS 'x')
"""
# RocketMQ ignores what follows a complete expression; we refuse the whole text.
TRAILING_TEXT = {
    "a = 5 b",
    "a = 1)",
    "a = 012",
    "a = 5 -- a comment without an end",
    "a = 'it's'",
    "a ; b",
    "a == 5",
}
# RocketMQ has no limit of the size of an expression.
TOO_LARGE = {text for text in REFUSED if len(text) > 100}
OPERATORS_OF_5 = ("CONTAINS", "STARTSWITH", "ENDSWITH")


def matching_bodies(client: Client, expression: str) -> list[bytes]:
    """Pull the messages that match an expression."""
    bodies: list[bytes] = []
    queue_offset, end = 0, client.max_offset("filtered", 0)
    while queue_offset < end:
        response = client.pull(
            "filtered", 0, queue_offset, subscription=expression, expression_type="SQL92"
        )
        assert response.code in (0, 20), (expression, response)
        bodies += [record.body for record in decode_records(response.body)]
        queue_offset = int(response.ext_fields["nextBeginOffset"])
    return bodies


def validation_code(client: Client, expression: str) -> int:
    """Return the code of the response to a request that validates an expression."""
    subscription = {"topic": "filtered", "subString": expression, "expressionType": "SQL92"}
    body = {"clientId": "c", "group": "g", "subscriptionData": subscription}
    return client.request(46, body=json.dumps(body).encode()).code


def uses_operator_of_5(expression: str) -> bool:
    return any(operator in expression for operator in OPERATORS_OF_5)


def test_both_match_the_same_messages(version: str, tmp_path: Path) -> None:
    assert REFUSED.keys() > TRAILING_TEXT
    settings = {"enablePropertyFilter": "true"}
    expressions = [*lines(MATCHES), *lines(DOES_NOT), *lines(ADDITIONAL)]
    refused = [text for text in REFUSED if text not in TRAILING_TEXT | TOO_LARGE]
    if version < "5":
        expressions = [text for text in expressions if not uses_operator_of_5(text)]
        refused = [text for text in refused if not uses_operator_of_5(text)]
    all_texts = [*expressions, *refused]
    with (
        ApacheRocketMQ(version, tmp_path / "apache", settings) as rocketmq,
        EscrowMQ(tmp_path / "ours", settings) as escrowmq,
        Client(rocketmq.address) as apache_client,
        Client(escrowmq.address) as our_client,
    ):
        for client in (apache_client, our_client):
            client.create_topic("filtered")
            client.create_group("interop-consumers")
            for number, properties in enumerate(PROPERTIES):
                client.send("filtered", b"%d" % number, {k: v for k, v in properties.items() if v})
        expected_codes = {text: validation_code(apache_client, text) for text in all_texts}
        assert {text: validation_code(our_client, text) for text in all_texts} == expected_codes
        expected_bodies = {text: matching_bodies(apache_client, text) for text in expressions}
        assert {text: matching_bodies(our_client, text) for text in expressions} == expected_bodies
