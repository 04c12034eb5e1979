"""Log lines: JSON with the pairs of a message as fields, and text that no client can forge."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.server.live_config import JsonFormatter, TextFormatter


def log_fields(message: str, *arguments: object, exc_info: Any = None) -> dict[str, Any]:
    """Return the fields of the line that a log call writes."""
    record = logging.LogRecord(
        "escrowmq.x", logging.WARNING, __file__, 1, message, arguments, exc_info
    )
    record.created = 1_700_000_000.25
    line = JsonFormatter("broker-a").format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert isinstance(fields, dict)
    return fields


def test_a_line_has_time_level_broker_logger_and_message() -> None:
    assert log_fields("stopping") == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "broker": "broker-a",
        "logger": "escrowmq.x",
        "message": "stopping",
    }


def test_pairs_in_a_message_are_fields() -> None:
    fields = log_fields(
        "connection closed peer=%s: idle for %d s, share=%.2f %%", "10.0.0.1:5", 120, 0.5
    )
    assert fields["message"] == "connection closed peer=10.0.0.1:5: idle for 120 s, share=0.50 %"
    assert (fields["peer"], fields["share"]) == ("10.0.0.1:5", 0.5)
    assert set(fields) == {"time", "level", "broker", "logger", "message", "peer", "share"}


@pytest.mark.parametrize("name", ["level", "message", "broker"])
def test_a_pair_does_not_replace_a_field_that_every_line_has(name: str) -> None:
    assert log_fields(f"unusual {name}=%s", "replaced")[name] != "replaced"


def test_an_exception_is_in_the_same_line() -> None:
    try:
        raise ValueError("größer")
    except ValueError:
        fields = log_fields("failed", exc_info=sys.exc_info())
    assert "ValueError: größer" in fields["exception"]


# --- text ----------------------------------------------------------------------------------------

LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def text_lines(message: str, *arguments: object, exc_info: Any = None) -> list[str]:
    """Return the lines that a log call writes, as any reader may split them."""
    record = logging.LogRecord(
        "escrowmq.x", logging.WARNING, __file__, 1, message, arguments, exc_info
    )
    return TextFormatter("broker-a ").format(record).splitlines()


def test_a_text_line_has_time_level_broker_logger_and_message() -> None:
    [line] = text_lines("connection closed peer=%s", "größer")
    assert line.endswith(" WARNING broker-a escrowmq.x connection closed peer=größer")


@given(st.text(alphabet=st.sampled_from(LINE_BREAKS + "\0\x1b\x7f ab%"), max_size=20))
def test_a_logged_value_never_begins_a_line(value: str) -> None:
    [line] = text_lines("decided id=%s", value)
    assert line.isprintable()
    json_line = JsonFormatter("b").format(
        logging.LogRecord("x", logging.INFO, "", 1, "decided id=%s", (value,), None)
    )
    assert len(json_line.splitlines()) == 1
    assert json.loads(json_line)["id"] == value


@pytest.mark.parametrize("separator", LINE_BREAKS)
def test_a_line_of_a_traceback_is_not_taken_for_a_line_of_its_own(separator: str) -> None:
    forged = f"x{separator}2026-01-01 00:00:00,000 INFO escrowmq.x forged"
    try:
        raise ValueError(forged)
    except ValueError:
        first, *others = text_lines("failed", exc_info=sys.exc_info())
    assert first.endswith("failed")
    assert any("ValueError" in line for line in others)
    assert all(line.startswith("  | ") for line in others)
