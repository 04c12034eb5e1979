"""Texts of commands: times, messages, rates, and results of `doctor`."""

from __future__ import annotations

import click
import pytest

from escrowmq.admin.messages import MessageView, decode_messages
from escrowmq.admin.queries import disk_used_ratio, recent_rate, uptime_s
from escrowmq.cli.commands.broker import ClusterSample, compare_samples
from escrowmq.cli.commands.doctor_checks import check_lines, ok, problem, warning
from escrowmq.cli.options import parse_duration_option, parse_start_option
from escrowmq.cli.rendering import message_line, message_lines
from escrowmq.errors import CorruptRecord
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.remoting.bodies import QueueName
from escrowmq.remoting.bodies_admin import (
    TopicOffset,
    decode_queue_key,
    decode_queue_tables,
    encode_queue_table,
)

HOST = encode_host("127.0.0.1", 10911)
CONTEXT = click.Context(click.Command("c"))
OPTION = click.Option(["--to"])


def message(body: bytes, **properties: str) -> MessageView:
    record = NewRecord(
        topic="orders",
        queue_id=1,
        body=body,
        properties=encode_properties(properties),
        born_host=HOST,
    )
    [decoded] = decode_messages(encode_record(record, 7, 4096, 1_000, HOST), "broker-a")
    return decoded


# --- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1970-01-01T00:00", 0),
        ("1970-01-01", 0),
        ("1970-01-01T00:00:01.5Z", 1_500),
        ("1970-01-01T02:00+02:00", 0),
    ],
)
def test_a_time_without_a_zone_is_utc(text: str, ms: int) -> None:
    assert parse_start_option(CONTEXT, OPTION, text) == ms


@pytest.mark.parametrize("text", ["yesterday", "", "2026-13-01", "10m"])
def test_an_invalid_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="2026-01-01T00:00"):
        parse_start_option(CONTEXT, OPTION, text)


def test_earliest_is_a_position_and_a_duration_has_a_unit() -> None:
    assert parse_start_option(CONTEXT, OPTION, "earliest") == "earliest"
    assert parse_start_option(CONTEXT, OPTION, None) is None
    assert parse_duration_option(CONTEXT, OPTION, "90s") == 90_000


# --- messages ------------------------------------------------------------------------------------


def test_a_body_is_shown_as_text_if_it_is_text() -> None:
    line = message_line(message(b"two\nlines", KEYS="k", TAGS="t"))
    assert line == "1970-01-01T00:00:01.000Z  broker-a/1#7  tags=t  keys=k  two\\nlines"
    assert message_line(message(b"\xff\x00")).endswith("  hex ff00")


def test_a_message_cannot_move_the_cursor() -> None:
    for body in (b"\x1b[2J", "a\u202eb".encode()):
        assert "\x1b" not in message_line(message(body))
        assert all(line.isprintable() for line in message_lines(message(body, x="\x1b[2J")))


def test_a_line_fits_into_the_terminal() -> None:
    assert len(message_line(message(b"x" * 500), 80)) == 80


def test_an_invalid_record_is_refused() -> None:
    with pytest.raises(CorruptRecord):
        list(decode_messages(b"\0" * 100, "broker-a"))


# --- figures -------------------------------------------------------------------------------------


def test_runtime_figures_are_parsed_from_texts() -> None:
    table = {
        "runtime": "[ 1 days, 2 hours, 3 minutes, 4 seconds ]",
        "putTps": "12.50 3.00 1.00",
        "commitLogDiskRatio": "0.25",
    }
    assert uptime_s(table) == 93_784
    assert recent_rate(table, "putTps") == 12.5
    assert disk_used_ratio(table) == 0.25
    assert (uptime_s({}), recent_rate({}, "putTps"), disk_used_ratio({})) == (0, 0.0, None)


def test_a_table_by_queue_is_decoded_as_it_was_encoded() -> None:
    queue = QueueName(topic="%RETRY%g", broker_name='unusual"}{:', queue_id=3)
    offset = TopicOffset(min_offset=1, max_offset=2, last_update_timestamp=3)
    tables = decode_queue_tables(encode_queue_table({queue: offset}, topicPutTps=0.5))
    [(key, value)] = tables["offsetTable"].items()
    assert decode_queue_key(key) == queue
    assert value == {"minOffset": 1, "maxOffset": 2, "lastUpdateTimestamp": 3}
    assert tables["topicPutTps"] == 0.5


def test_rates_are_measured_between_two_samples_and_never_negative() -> None:
    first = ClusterSample(10.0, max_offsets={("a", "t"): 100, ("a", "u"): 50}, min_offsets={})
    second = ClusterSample(
        12.0,
        # Topic u was deleted and created again, and broker b has started.
        max_offsets={("a", "t"): 110, ("b", "t"): 70, ("a", "u"): 0},
        min_offsets={("a", "t"): 10, ("b", "t"): 0, ("a", "u"): 0},
    )
    topics = compare_samples(first, second)["topics"]
    assert topics == [
        {"topic": "t", "in_per_s": 5.0, "messages": 170},
        {"topic": "u", "in_per_s": 0.0, "messages": 0},
    ]


def test_a_remedy_is_printed_below_its_result() -> None:
    results = [ok("a", "fine"), warning("bb", "odd", "do this"), problem("c", "bad", "do")]
    lines = list(check_lines(results))
    assert lines == [
        "ok       a   fine",
        "WARNING  bb  odd",
        "             -> do this",
        "PROBLEM  c   bad",
        "             -> do",
        "",
        "1 problem, 1 warning",
    ]
    assert list(check_lines([])) == ["no problems"]
