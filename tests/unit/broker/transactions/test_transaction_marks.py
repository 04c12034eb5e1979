"""A send is a half if its property TRAN_MSG is true for Java, whatever its sysFlag says."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.message import names
from escrowmq.message.properties import encode_properties
from escrowmq.remoting.requests import Request
from tests.support.broker_requests import send_request
from tests.support.escrows import COMMIT, EscrowBench, position_of

NONE, PREPARED, COMMITTED, ROLLED_BACK = 0, 4, 8, 12


def marked_send(sys_flag: int, mark: str = "", **properties: str) -> Request[Any]:
    """Return a send of group p whose property TRAN_MSG is `mark`, or is missing."""
    marked = {"UNIQ_KEY": "k", "PGROUP": "p", **({"TRAN_MSG": mark} if mark else {}), **properties}
    text = encode_properties(marked).decode()
    reconsume_times = 1 if "DELAY" in properties else 0
    return send_request(
        "T", b"k", properties=text, sys_flag=sys_flag, reconsume_times=reconsume_times
    )


@pytest.mark.parametrize("sys_flag", [NONE, PREPARED, ROLLED_BACK])
@pytest.mark.parametrize("mark", ["true", "True", "TRUE", "tRuE"])
def test_a_send_marked_true_in_any_case_is_a_half(mark: str, sys_flag: int) -> None:
    bench = EscrowBench()
    response = bench.request(marked_send(sys_flag, mark))
    assert response.code == 0, response.remark
    assert bench.bodies() == [], "delivered before the commit"
    assert bench.end(position_of(response), COMMIT).code == 0
    assert bench.bodies() == [b"k"]
    assert "TRAN_MSG" not in bench.messages()[0].properties.decode()


@pytest.mark.parametrize("mark", ["false", "yes", "1", " true"])
def test_a_send_with_another_mark_is_an_ordinary_message(mark: str) -> None:
    bench = EscrowBench()
    assert bench.request(marked_send(NONE, mark)).code == 0
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize("mark", ["", "no"])
@pytest.mark.parametrize("sys_flag", [PREPARED, ROLLED_BACK])
def test_a_send_that_consumers_could_not_read_is_refused(sys_flag: int, mark: str) -> None:
    bench = EscrowBench()
    response = bench.request(marked_send(sys_flag, mark))
    assert response.code == 13
    assert f"sysFlag {sys_flag}" in response.remark
    assert "TRAN_MSG" in response.remark
    assert bench.bodies() == []
    assert bench.messages(names.HALF_TOPIC) == []


def test_a_send_marked_as_committed_is_delivered() -> None:
    bench = EscrowBench()
    assert bench.request(marked_send(COMMITTED)).code == 0
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize("sys_flag", [NONE, PREPARED])
def test_a_delayed_retry_keeps_its_mark_and_is_delivered(sys_flag: int) -> None:
    """An old client sends a committed message back with the mark of its half."""
    bench = EscrowBench()
    assert bench.request(marked_send(sys_flag, "true", DELAY="1")).code == 0
    bench.tick(after_ms=1_100)
    assert bench.bodies() == [b"k"]
