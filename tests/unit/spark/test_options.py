"""Options of a read: unknown names are refused with a hint, invalid values with a reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import InvalidOption
from escrowmq.remoting.command import Command
from escrowmq.spark import options as spark_options
from escrowmq.spark.offsets import QueueTimes, SymbolicOffset, from_nested, to_nested
from escrowmq.spark.options import (
    SERVERS,
    TIMEOUT_MS,
    Option,
    Options,
    int_between,
    parse_access,
    parse_options,
    parse_read_options,
)

REQUIRED = {"servers": "s:1", "subscribe": "orders"}


def parse(changes: dict[str, str] | None = None, *, is_stream: bool = False) -> Options:
    """Parse the required options and these."""
    return parse_read_options({**REQUIRED, **(changes or {})}, is_stream=is_stream)


def test_names_may_have_any_case_and_be_aliases() -> None:
    aliases = {
        "nameserver": "s:1",
        "TOPIC": "orders,  paid",
        "subexpression": "a || b",
        "pulltimeoutms": "5000",
        "pullbatchsize": "32",
        "checkpointLocation": "any",
    }
    options = parse_read_options(aliases, is_stream=False)
    assert (options[SERVERS], options[spark_options.SUBSCRIBE]) == ("s:1", ["orders", "paid"])
    assert (options[spark_options.TAGS], options[spark_options.PULL_BATCH_SIZE]) == ("a || b", 32)
    assert options[TIMEOUT_MS] == 5000
    assert pickle.loads(pickle.dumps(options))[SERVERS] == "s:1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"subscribes": "a"}, "no option 'subscribes'; did you mean subscribe?"),
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets?"),
        ({"topic": "other"}, "subscribe is given twice"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss 'maybe': expected true or false"),
        ({"minPartitions": "0"}, "the minimum is 1"),
        ({"minPartitions": "two"}, "a whole number"),
        ({"mode": "all"}, "one of messages, transactions"),
        ({"startingOffsets": "first"}, "earliest, latest, or JSON"),
        ({"startingOffsets": "{"}, "invalid JSON"),
        ({"startingOffsets": '{"t": 3}'}, "topic.*broker"),
        ({"startingOffsets": '{"t": {"b": {"0": 1.5}}}'}, "topic.*broker"),
        ({"startingOffsets": '{"t": {"b": {"0": -3}}}'}, "-1 for the latest"),
        ({"startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"startingOffsets": "latest"}, "would be empty"),
        ({"endingOffsets": "earliest"}, "would be empty"),
        ({"subscribePattern": ".*"}, "there is subscribe and subscribePattern"),
        ({"mode": "transactions"}, "remove subscribe"),
        ({"tags": "a", "sql": "b > 1"}, "not both"),
        ({"maxOffsetsPerTrigger": "5"}, "for a stream only"),
        ({"path": "/d"}, "servers cannot be used with path"),
        ({"accessKey": "a"}, "belong together"),
    ],
)
def test_an_invalid_option_is_refused_with_a_reason(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason.replace("?", r"\?")):
        parse_access(parse(changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"endingOffsets": "latest"}, "for a batch only"),
        ({"reportOffsets": "true"}, "needs the group"),
        ({"path": "/d"}, "only be read in a batch"),
    ],
)
def test_a_stream_refuses_options_of_a_batch(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        parse(changes, is_stream=True)


@pytest.mark.parametrize("changes", [{}, {"servers": "s:1"}, {"subscribe": "a"}])
def test_a_missing_option_is_named(changes: dict[str, str]) -> None:
    with pytest.raises(InvalidOption, match=r"servers is missing|none of them"):
        parse_read_options(changes, is_stream=False)


def test_a_time_takes_precedence_over_offsets() -> None:
    options = parse({"startingTimestamp": "5", "startingOffsets": "earliest"})
    start = spark_options.start_position(options, is_stream=False)
    assert isinstance(start, QueueTimes)
    assert start.time_ms_of(MessageQueue("t", "b", 0)) == 5
    assert spark_options.start_position(parse(), is_stream=False) is SymbolicOffset.EARLIEST
    assert (
        spark_options.start_position(parse(is_stream=True), is_stream=True) is SymbolicOffset.LATEST
    )
    assert spark_options.end_position(parse()) is SymbolicOffset.LATEST


def test_every_option_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
    missing = [
        option.name for option in spark_options.READ_OPTIONS if f"`{option.name}`" not in manual
    ]
    assert not missing


def test_a_secret_is_not_repeated_in_an_error() -> None:
    secret: Option[int] = Option("secretKey", int_between(), 0, "", is_secret=True)
    with pytest.raises(InvalidOption) as error:
        parse_options({"secretKey": "hush"}, [secret])
    assert "hush" not in str(error.value)


def test_offsets_are_encoded_in_order_and_decoded() -> None:
    offsets = {
        MessageQueue("b", "x", 10): 1,
        MessageQueue("b", "x", 9): 2,
        MessageQueue("a", "y", 0): 3,
    }
    nested = to_nested(offsets)
    assert list(nested) == ["a", "b"]
    assert list(nested["b"]["x"]) == ["9", "10"]
    assert from_nested(nested) == offsets


def test_a_request_is_signed_over_its_sorted_values_and_body() -> None:
    sign = Access(access_key="key", secret_key="secret").signer()
    assert sign is not None
    signed = sign(Command(code=10, opaque=1, ext_fields={"b": "2", "a": "1"}), b"body")
    assert signed["AccessKey"] == "key"
    # Computed by: printf key12body | openssl dgst -sha1 -hmac secret -binary | base64
    # AccessKey comes first, because upper case sorts before lower case.
    assert signed["Signature"] == "RO+2E9a0n4A4OVx5POCCEy+V7cw="
    assert NO_ACCESS.signer() is None
