"""Log lines as JSON: the key=value pairs of a message become fields."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from escrowmq.server.live_config import JsonFormatter


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
