"""What a retry or a dead letter keeps of a failure, and what it does not believe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.message.delivery_failure import (
    NO_REPORT,
    DeliveryFailure,
    FailureReport,
    broker_properties,
    client_properties,
    failure_of,
    report_of_client,
    shorten,
    without_failure,
)
from escrowmq.message.names import has_control_characters
from escrowmq.message.properties import decode_properties, encode_properties

ADDRESS = "10.0.0.7:40000"
REPORT = FailureReport("ValueError", "no such account", "worker-3", 2)


def stored(report: FailureReport = REPORT, **changes: object) -> dict[str, str]:
    """Return the properties that a broker stores."""
    arguments: dict[str, object] = {
        "earlier": {},
        "address": ADDRESS,
        "attempts": 1,
        "now_ms": 1_000,
        "bytes_max": 10_000,
    }
    return broker_properties(report, **{**arguments, **changes})  # type: ignore[arg-type]


def test_a_failure_is_read_as_it_was_stored() -> None:
    expected = DeliveryFailure("ValueError", "no such account", "worker-3", ADDRESS, 1_000, 2)
    assert failure_of(stored()) == expected
    assert expected.cause == "ValueError: no such account"


def test_a_message_without_a_failure_has_none() -> None:
    assert failure_of({"KEYS": "k", "DLQ_CAUSE_TEXT": "of the application"}) is None


def test_without_a_report_the_cause_is_unknown_and_the_rest_is_known() -> None:
    failure = failure_of(stored(NO_REPORT, attempts=17))
    assert failure == DeliveryFailure("unknown", "", "", ADDRESS, 1_000, 17)
    assert failure.cause == "unknown"


def test_a_text_alone_is_a_cause() -> None:
    failure = failure_of(stored(FailureReport(error_text="not JSON")))
    assert failure is not None
    assert failure.cause == "not JSON"


def test_a_client_cannot_claim_fewer_attempts_than_were_counted() -> None:
    assert stored(FailureReport("E", attempts=1), attempts=5)["ESCROW_CAUSE_ATTEMPTS"] == "5"
    assert stored(FailureReport("E", attempts=9), attempts=5)["ESCROW_CAUSE_ATTEMPTS"] == "9"


def test_the_last_known_cause_stays_if_a_later_consumer_reports_none() -> None:
    earlier = stored()
    later = stored(NO_REPORT, earlier=earlier, address="other:1", attempts=3, now_ms=9_000)
    assert later == {**earlier, "ESCROW_CAUSE_ATTEMPTS": "3"}


def test_a_later_cause_replaces_all_of_an_earlier_one() -> None:
    later = stored(FailureReport("KeyError"), earlier=stored(), address="other:1", now_ms=9_000)
    assert failure_of(later) == DeliveryFailure("KeyError", "", "", "other:1", 9_000, 1)


def test_what_does_not_fit_is_left_out_the_text_first() -> None:
    full = stored()
    size = len(encode_properties(full))
    assert stored(bytes_max=size) == full
    without_text = {name: value for name, value in full.items() if name != "ESCROW_CAUSE_TEXT"}
    assert stored(bytes_max=size - 1) == without_text
    assert stored(bytes_max=10) == {}


def test_the_properties_of_a_client_are_marked_and_never_hide_those_of_a_broker() -> None:
    claimed = client_properties(REPORT, now_ms=5)
    failure = failure_of(claimed)
    assert failure == DeliveryFailure("ValueError", "no such account", "worker-3", "", 5, 2, True)
    assert failure_of({**claimed, **stored(NO_REPORT)}) == failure_of(stored(NO_REPORT))
    assert report_of_client(claimed) == REPORT
    assert without_failure({**claimed, **stored(), "KEYS": "k"}) == {"KEYS": "k"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\n\tc", "a b c"),
        ("\x1b[31mred\x07", "[31mred"),
        ("x\x01y\x02z\x00", "x y z"),
        ("a\u202egnirts", "a gnirts"),
        ("'; DROP TABLE orders; --", "'; DROP TABLE orders; --"),
        ("\ud800", "?"),
        ("ü" * 20, "üü…"),
    ],
)
def test_a_text_is_shown_in_one_printable_line(text: str, shown: str) -> None:
    assert shorten(text, 24 if text.isascii() or len(text) < 10 else 8) == shown


@given(st.text(alphabet=st.characters(codec=None)), st.integers(4, 40))
def test_any_text_becomes_short_valid_and_printable(text: str, bytes_max: int) -> None:
    short = shorten(text, bytes_max)
    assert len(short.encode()) <= bytes_max
    assert not has_control_characters(short)


@given(*([st.text(alphabet=st.characters(codec=None), max_size=2000)] * 3), st.integers())
def test_any_report_can_be_stored(error_type: str, text: str, host: str, attempts: int) -> None:
    report = FailureReport.cleaned(error_type, text, host, attempts)
    properties = stored(report)
    assert decode_properties(encode_properties(properties)) == properties
    failure = failure_of(properties)
    assert failure is not None
    assert failure.error_text == report.error_text
