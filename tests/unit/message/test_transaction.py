"""Verdicts under both names."""

from __future__ import annotations

import pytest

from escrowmq import LocalTransactionState, Verdict


@pytest.mark.parametrize(
    ("rocketmq_name", "verdict"),
    [
        ("COMMIT_MESSAGE", Verdict.COMMIT),
        ("ROLLBACK_MESSAGE", Verdict.ROLLBACK),
        ("UNKNOW", Verdict.UNKNOWN),
    ],
)
def test_rocketmqs_states_are_the_verdicts(rocketmq_name: str, verdict: Verdict) -> None:
    assert getattr(LocalTransactionState, rocketmq_name) is verdict


def test_there_are_three_verdicts_and_logs_show_our_names() -> None:
    assert [verdict.name for verdict in Verdict] == ["UNKNOWN", "COMMIT", "ROLLBACK"]
