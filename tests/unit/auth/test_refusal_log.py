"""Log lines about refused requests: one per minute for each cause, and a limited number in all."""

from __future__ import annotations

import pytest

from escrowmq.auth.validator import RefusalLog
from escrowmq.remoting.codes import RequestCode

SEND = RequestCode.SEND_MESSAGE_V2
MINUTE_MS = RefusalLog.INTERVAL_MS


@pytest.fixture
def refusals() -> RefusalLog:
    return RefusalLog()


def test_a_line_names_peer_key_request_and_reason(
    refusals: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    refusals.add("10.0.0.1:5", "billing", SEND, "the signature is wrong", now_ms=0)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "request refused peer=10.0.0.1:5 access_key=billing request=SEND_MESSAGE_V2 "
        "refused_before=0: the signature is wrong"
    )


def test_repetitions_are_counted_until_the_next_minute(
    refusals: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(100):
        refusals.add(f"10.0.0.1:{number}", "billing", SEND, "wrong", now_ms=number)
    assert len(caplog.records) == 1
    refusals.add("10.0.0.2:5", "billing", SEND, "wrong", now_ms=100)
    refusals.add("10.0.0.1:5", "sales", SEND, "wrong", now_ms=100)
    refusals.add("10.0.0.1:5", "billing", SEND, "another reason", now_ms=100)
    assert len(caplog.records) == 4
    refusals.add("10.0.0.1:6", "billing", SEND, "wrong", now_ms=MINUTE_MS)
    assert "peer=10.0.0.1:6" in caplog.messages[-1]
    assert "refused_before=99" in caplog.messages[-1]


def test_many_different_keys_do_not_fill_the_log(
    refusals: RefusalLog, caplog: pytest.LogCaptureFixture
) -> None:
    count = RefusalLog.LINES_MAX + 30
    for number in range(count):
        refusals.add("10.0.0.1:5", f"key-{number}", SEND, "wrong", now_ms=0)
    assert len(caplog.records) == RefusalLog.LINES_MAX
    refusals.add("10.0.0.1:5", "key", SEND, "wrong", now_ms=MINUTE_MS)
    assert caplog.messages[-2] == "requests refused without a line of their own count=30"
