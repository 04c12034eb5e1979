"""Log lines as JSON: the pairs of a message are fields."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from escrowmq.server.live_config import JsonFormatter


def line(message: str, *arguments: object, **more: Any) -> dict[str, Any]:
    record = logging.LogRecord(
        "escrowmq.x", logging.WARNING, __file__, 1, message, arguments, more.get("exc_info")
    )
    record.created = 1_700_000_000.25
    written = JsonFormatter("broker-a").format(record)
    assert "\n" not in written
    found = json.loads(written)
    assert isinstance(found, dict)
    return found


def test_a_line_has_time_level_broker_logger_and_message() -> None:
    assert line("stopping") == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "WARNING",
        "broker": "broker-a",
        "logger": "escrowmq.x",
        "message": "stopping",
    }


def test_pairs_in_a_message_are_fields() -> None:
    found = line(
        "connection closed peer=%s: silent for %d s, share=%.2f %%", "10.0.0.1:5", 120, 0.5
    )
    assert found["message"] == "connection closed peer=10.0.0.1:5: silent for 120 s, share=0.50 %"
    assert (found["peer"], found["share"]) == ("10.0.0.1:5", 0.5)
    assert set(found) == {"time", "level", "broker", "logger", "message", "peer", "share"}


@pytest.mark.parametrize("name", ["level", "message", "broker"])
def test_a_pair_does_not_replace_what_every_line_has(name: str) -> None:
    assert line(f"odd {name}=%s", "mine")[name] != "mine"


def test_an_exception_is_in_the_same_line() -> None:
    try:
        raise ValueError("größer")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert "ValueError: größer" in found["exception"]
