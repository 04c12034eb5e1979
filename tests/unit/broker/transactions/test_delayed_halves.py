"""Delayed transactional messages: the delay is checked at the send and counts from the commit."""

from __future__ import annotations

from escrowmq.config import DelayConfig
from escrowmq.remoting.codes import ResponseCode
from tests.support.broker_requests import send_request
from tests.support.escrows import COMMIT, EscrowBench, HalfPosition

TOO_LONG = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02TIMER_DELAY_SEC\x01{10**8}\x02"


def test_an_unsupported_delay_is_refused_at_the_send() -> None:
    bench = EscrowBench()
    response = bench.request(send_request(properties=TOO_LONG))
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert len(bench.coordinator.halves) == 0


def test_a_message_whose_delay_is_no_longer_supported_is_delivered_at_once() -> None:
    bench = EscrowBench()
    # Private: in production the limit changes only with a restart.
    bench.broker.delayed_messages._config = DelayConfig(timer_delay_max_s=2**31 - 1)
    assert bench.request(send_request(properties=TOO_LONG)).code == 0
    # Private, for the same reason.
    bench.broker.delayed_messages._config = DelayConfig()
    [half] = bench.coordinator.halves
    bench.end(HalfPosition(half.queue_offset, half.log_offset), COMMIT, group="p")
    assert bench.bodies() == [b"body"]
