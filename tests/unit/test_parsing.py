"""Addresses, times, durations, sizes and suggestions are parsed the same everywhere."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from escrowmq.admin import Cluster
from escrowmq.cli.commands.pipeline import SinceParam
from escrowmq.client.access import NO_ACCESS
from escrowmq.client.connection import ConnectionPool
from escrowmq.client.routes import Routes
from escrowmq.clock import ManualClock, epoch_ms
from escrowmq.config.setting_types import AddressList
from escrowmq.errors import BrokenBody
from escrowmq.parsing import (
    did_you_mean,
    format_duration,
    format_file_timestamp,
    format_rough_duration,
    format_size,
    format_timestamp,
    parse_address,
    parse_duration_ms,
    parse_lenient_json,
    parse_servers,
    parse_timestamp,
    quote_number_keys,
)
from escrowmq.spark.queues import ReadCluster, WriteCluster

# --- addresses -----------------------------------------------------------------------------------

TWO_SERVERS = ["a:1", "b:2"]


@pytest.mark.parametrize("text", ["a:1;b:2", "a:1,b:2", "a:1 b:2", " a:1 ;\n b:2; ", ";a:1,;b:2"])
def test_all_separators_of_a_server_list_mean_the_same(text: str) -> None:
    assert parse_servers(text) == TWO_SERVERS


def test_servers_may_be_given_as_a_sequence() -> None:
    assert parse_servers(TWO_SERVERS) == TWO_SERVERS
    assert parse_servers(["a:1;b:2", " [::1]:3 "]) == ["a:1", "b:2", "[::1]:3"]


@pytest.mark.parametrize("text", ["a:1,b:2", "a:1;b:2"])
def test_client_spark_and_settings_split_a_server_list_alike(text: str) -> None:
    pool: Any = ConnectionPool.__new__(ConnectionPool)  # not used: nothing connects here
    # Private: Routes has no public view of the parsed addresses.
    assert Routes(text, pool, ManualClock())._servers == TWO_SERVERS
    assert WriteCluster(text, NO_ACCESS, wait_s=1).servers == TWO_SERVERS
    assert ReadCluster(text, NO_ACCESS).servers == TWO_SERVERS
    assert list(AddressList().parse(text)) == TWO_SERVERS


@pytest.mark.parametrize("text", ["", " ; ,", "a", "a:", "a:x", "a:0", "a:65536", ":1", "::1:2"])
def test_a_server_list_without_addresses_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_servers(text)
    with pytest.raises(ValueError, match="expected host:port"):
        Cluster(text)


def test_an_address_has_a_host_and_a_port() -> None:
    assert parse_address("localhost:9876") == ("localhost", 9876)
    assert parse_address("[::1]:9876") == ("::1", 9876)


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
def test_a_time_without_an_offset_is_utc(text: str, ms: int) -> None:
    assert epoch_ms(parse_timestamp(text)) == ms


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_the_option_since_takes_a_time_without_an_offset_as_utc(
    zone: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from time import tzset

    request.addfinalizer(tzset)  # runs before the variable is restored by monkeypatch
    monkeypatch.setenv("TZ", zone)
    tzset()
    convert = SinceParam().convert
    assert convert("2026-01-01T00:00", None, None) == 1_767_225_600_000
    assert convert("2026-01-01T01:00+01:00", None, None) == 1_767_225_600_000
    assert convert("all", None, None) == 0
    assert convert("2h", None, None) == -7_200_000
    with pytest.raises(click.BadParameter, match="2026-13-01"):
        convert("2026-13-01", None, None)


@pytest.mark.parametrize("text", ["yesterday", "", "2026-13-01", "10m"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time, expected one such as 2026-01-01T00:00"):
        parse_timestamp(text)


def test_times_are_formatted_in_utc() -> None:
    assert format_timestamp(1_767_225_600_007) == "2026-01-01T00:00:00.007Z"
    assert format_file_timestamp(1_767_225_600_007) == "20260101000000007"


def test_an_impossible_time_of_a_damaged_record_still_names_a_file() -> None:
    assert format_file_timestamp(-(1 << 63)) == "19700101000000000"
    assert format_file_timestamp((1 << 63) - 1) == "99991231235959999"


@pytest.mark.parametrize("ms", [1 << 62, -(1 << 62)])
def test_a_time_outside_of_the_calendar_is_shown_as_a_number(ms: int) -> None:
    assert format_timestamp(ms) == f"{ms} ms"


# --- durations, sizes, names ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("90s", 90_000), (" 10 m ", 600_000), ("2h", 7_200_000), ("7d", 604_800_000)],
)
def test_a_duration_has_a_unit(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms
    assert parse_duration_ms(format_duration(ms)) == ms


def test_a_number_without_a_unit_needs_a_default_unit() -> None:
    assert parse_duration_ms("90", default_unit="s") == 90_000
    with pytest.raises(ValueError, match="'90' is not a duration"):
        parse_duration_ms("90")


@pytest.mark.parametrize("text", ["", "s", "1y", "1.5h", "-1s", "1234567890s", "1s 2s"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected one such as 90s"):
        parse_duration_ms(text, default_unit="s")


def test_a_rough_duration_changes_its_unit_at_two() -> None:
    texts = [format_rough_duration(ms) for ms in (-5, 0, 119_999, 120_000, 7_199_999, 7_200_000)]
    assert texts == ["0s", "0s", "119s", "2m", "119m", "2h"]
    assert format_rough_duration(172_800_000) == "2d"


def test_sizes_are_in_units_of_1024() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]


def test_the_most_similar_name_is_suggested() -> None:
    assert did_you_mean("TOPC", ["topic", "group"]) == "; did you mean topic?"
    assert did_you_mean("xyz", ["topic", "group"]) == ""
    assert did_you_mean("topc", ["topic"], cutoff=0.95) == ""
    assert did_you_mean("topic", []) == ""


# --- JSON as Java writes it ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "quoted"),
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
def test_only_number_keys_are_quoted(source: str, quoted: str) -> None:
    assert quote_number_keys(source) == quoted


def test_the_offsets_file_of_a_java_broker_is_parsed() -> None:
    source = b'{"offsetTable":{"orders@group":{0:12,1:7},"%RETRY%group@group":{0:0}}}'
    assert parse_lenient_json(source) == {
        "offsetTable": {"orders@group": {"0": 12, "1": 7}, "%RETRY%group@group": {"0": 0}}
    }


@pytest.mark.parametrize(
    "source",
    [b"", b"{0}", b"{0:}", b"{x:1}", b'{{"topic":"t"}:1}', b'"\xff"', b"[" * 100_000],
)
def test_other_invalid_json_is_refused(source: bytes) -> None:
    with pytest.raises(BrokenBody):
        parse_lenient_json(source)


@pytest.mark.parametrize(
    "piece", ['\\"', '"', "{", "{ ", ",1", "{1", '"\\', "1:", "{1 ", '{1:"'], ids=repr
)
def test_quoting_takes_linear_time(piece: str) -> None:
    # A quadratic algorithm would take about 10^11 steps and exceed the time limit of the suite.
    text = '"' * (piece == '\\"') + piece * 300_000
    assert len(quote_number_keys(text)) >= len(text)


def test_plain_json_is_not_changed() -> None:
    text = json.dumps({"a": [1, -2.5e3, None, True, "x,1:"], "b": {"1": {}}})
    assert quote_number_keys(text) == text
