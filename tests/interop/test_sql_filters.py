"""Every expression of our own table, asked of Apache RocketMQ: does it match the same messages?"""

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

ODD = [
    MESSAGE,
    {},
    {"a": "5", "missing": "5"},
    {"a": "x", "missing": "x", "word": "5"},
    {"a": "5.0", "half": "NaN", "word": "", "yes": "True", "missing": "2"},
    {"a": " 5", "b": "+3", "one": "0x1p3", "half": "1d", "word": "it's", "spaced": "-0.0"},
    {"a": "-5", "long": "2147483648", "half": ".5f", "nan": "-Infinity", "word": "1e400"},
    {"a": "\u0665", "one": "1_0", "half": "5.", "nan": "Infinity", "spaced": "\t9"},
]
MORE = """
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
# Its parser stops where it has understood enough; ours wants nothing to be left.
LEFT_OVER = [text for text, (_, why) in REFUSED.items() if why == "too much"]
LEFT_OVER += ["a = 'it's'", "a ; b", "a == 5"]
OURS_ALONE = [text for text, (_, why) in REFUSED.items() if why in ("deep", "200 operators")]
NEW = ("CONTAINS", "STARTSWITH", "ENDSWITH")  # since 5.0


def matched(client: Client, expression: str) -> list[bytes]:
    found: list[bytes] = []
    at, end = 0, client.max_offset("odd", 0)
    while at < end:
        answer = client.pull("odd", 0, at, subscription=expression, expression_type="SQL92")
        assert answer.code in (0, 20), (expression, answer)
        found += [record.body for record in decode_records(answer.body)]
        at = int(answer.ext_fields["nextBeginOffset"])
    return found


def code_of(client: Client, expression: str) -> int:
    wanted = {"topic": "odd", "subString": expression, "expressionType": "SQL92"}
    body = {"clientId": "c", "group": "g", "subscriptionData": wanted}
    return client.request(46, body=json.dumps(body).encode()).code


@pytest.mark.parametrize("version", ["4.9.7", "5.5.0"])
def test_both_match_the_same_messages(version: str, tmp_path: Path) -> None:
    settings = {"enablePropertyFilter": "true"}
    asked = [*lines(MATCHES), *lines(DOES_NOT), *lines(MORE)]
    refused = [text for text in REFUSED if text not in (*LEFT_OVER, *OURS_ALONE)]
    if version < "5":
        asked = [text for text in asked if not any(word in text for word in NEW)]
        refused = [text for text in refused if not any(word in text for word in NEW)]
    with (
        ApacheRocketMQ(version, tmp_path / "apache", settings) as theirs,
        EscrowMQ(tmp_path / "ours", settings) as ours,
        Client(theirs.address) as at_theirs,
        Client(ours.address) as at_ours,
    ):
        for client in (at_theirs, at_ours):
            client.create_topic("odd")
            client.create_group("interop-consumers")
            for number, properties in enumerate(ODD):
                client.send("odd", b"%d" % number, {k: v for k, v in properties.items() if v})
        wrong = [
            (text, [code_of(at_theirs, text), code_of(at_ours, text)])
            for text in (*asked, *refused)
            if code_of(at_theirs, text) != code_of(at_ours, text)
        ]
        wrong += [
            (text, [matched(at_theirs, text), matched(at_ours, text)])  # type: ignore[list-item]
            for text in asked
            if matched(at_theirs, text) != matched(at_ours, text)
        ]
        assert not wrong
