"""Options: every name is known or refused with a hint, every value is read or refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from escrowmq.errors import InvalidOption
from escrowmq.spark import options as read
from escrowmq.spark.offsets import QueueKey, SymbolicOffset, from_nested, to_nested
from escrowmq.spark.options import (
    SERVERS,
    Option,
    SparkAccess,
    int_between,
    parse_access,
    parse_options,
    parse_read_options,
)

GIVEN = {"servers": "s:1", "subscribe": "orders"}


def chosen(given: dict[str, str] | None = None, *, is_stream: bool = False) -> Any:
    return parse_read_options({**GIVEN, **(given or {})}, is_stream=is_stream)


def test_names_are_found_in_any_case_and_by_their_old_names() -> None:
    old = {
        "nameserver": "s:1",
        "TOPIC": "orders,  paid",
        "subexpression": "a || b",
        "pulltimeoutms": "5000",
        "pullbatchsize": "32",
        "checkpointLocation": "anywhere",
    }
    found = parse_read_options(old, is_stream=False)
    assert (found[SERVERS], found[read.SUBSCRIBE]) == ("s:1", ["orders", "paid"])
    assert (found[read.TAGS], found[read.PULL_BATCH_SIZE]) == ("a || b", 32)
    assert parse_access(found).timeout_s == 5.0
    assert pickle.loads(pickle.dumps(found))[SERVERS] == "s:1"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"subscribes": "a"}, "no option 'subscribes'; did you mean subscribe?"),
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets?"),
        ({"topic": "other"}, "subscribe is there twice"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss 'maybe': true or false"),
        ({"minPartitions": "0"}, "it must be 1 at least"),
        ({"minPartitions": "two"}, "a whole number"),
        ({"mode": "all"}, "one of messages, transactions"),
        ({"startingOffsets": "first"}, "earliest, latest, or JSON"),
        ({"startingOffsets": "{"}, "no JSON"),
        ({"startingOffsets": '{"t": 3}'}, "topic.*broker"),
        ({"startingOffsets": '{"t": {"b": {"0": 1.5}}}'}, "topic.*broker"),
        ({"startingOffsets": '{"t": {"b": {"0": -3}}}'}, "-1 for the latest"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"startingOffsets": "latest"}, "would be empty"),
        ({"endingOffsets": "earliest"}, "would be empty"),
        ({"subscribePattern": ".*"}, "there is subscribe and subscribePattern"),
        ({"mode": "transactions"}, "leave subscribe out"),
        ({"tags": "a", "sql": "b > 1"}, "not both"),
        ({"maxOffsetsPerTrigger": "5"}, "for a stream only"),
        ({"path": "/d"}, "servers does not go with path"),
        ({"accessKey": "a"}, "go together"),
    ],
)
def test_a_wrong_option_says_what_is_wrong_with_it(given: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidOption, match=why.replace("?", r"\?")):
        parse_access(chosen(given))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"endingOffsets": "latest"}, "for a batch only"),
        ({"reportOffsets": "true"}, "needs a group"),
        ({"path": "/d"}, "read in a batch"),
    ],
)
def test_a_stream_refuses_what_does_not_fit_it(given: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        chosen(given, is_stream=True)


@pytest.mark.parametrize("given", [{}, {"servers": "s:1"}, {"subscribe": "a"}])
def test_what_is_missing_is_named(given: dict[str, str]) -> None:
    with pytest.raises(InvalidOption, match=r"servers is missing|none of them"):
        parse_read_options(given, is_stream=False)


def test_a_time_counts_more_than_offsets() -> None:
    found = chosen({"startingTimestamp": "5", "startingOffsets": "earliest"})
    assert read.start_position(found, is_stream=False).time_ms_of(QueueKey("t", "b", 0)) == 5
    assert read.start_position(chosen(), is_stream=False) is SymbolicOffset.EARLIEST
    assert read.start_position(chosen(is_stream=True), is_stream=True) is SymbolicOffset.LATEST
    assert read.end_position(chosen()) is SymbolicOffset.LATEST


def test_every_option_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    missing = [option.name for option in read.READ_OPTIONS if f"`{option.name}`" not in manual]
    assert not missing


def test_a_secret_is_not_repeated_in_an_error() -> None:
    secret: Option[int] = Option("secretKey", int_between(), 0, "", is_secret=True)
    with pytest.raises(InvalidOption) as error:
        parse_options({"secretKey": "hush"}, [secret])
    assert "hush" not in str(error.value)


def test_offsets_are_written_sorted_and_read_back() -> None:
    offsets = {QueueKey("b", "x", 10): 1, QueueKey("b", "x", 9): 2, QueueKey("a", "y", 0): 3}
    written = to_nested(offsets)
    assert list(written) == ["a", "b"]
    assert list(written["b"]["x"]) == ["9", "10"]
    assert from_nested(written) == offsets


def test_a_request_is_signed_over_its_sorted_values_and_body() -> None:
    access = SparkAccess(access_key="key", secret_key="secret")
    signed = access.sign({"b": "2", "a": "1"}, b"body")
    assert signed["AccessKey"] == "key"
    # printf key12body | openssl dgst -sha1 -hmac secret -binary | base64; upper case sorts first.
    assert signed["Signature"] == "RO+2E9a0n4A4OVx5POCCEy+V7cw="
    assert SparkAccess().sign({"a": "1"}, b"") == {"a": "1"}
