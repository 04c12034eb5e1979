"""A transactional message with a delay: refused with its send, or delayed from its commit."""

from __future__ import annotations

from escrowmq.config import DelayConfig
from escrowmq.remoting.codes import ResponseCode
from tests.support.broker_requests import a_send
from tests.support.escrows import COMMIT, EscrowBench, HalfPosition

TOO_LONG = f"TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02TIMER_DELAY_SEC\x01{10**8}\x02"


def test_a_delay_that_is_not_served_is_refused_with_the_send() -> None:
    bench = EscrowBench()
    bench.broker.handle(bench.channel, a_send(properties=TOO_LONG), bench.now_ms)
    bench.turn()
    assert bench.channel.answer().code == ResponseCode.MESSAGE_ILLEGAL
    assert len(bench.coordinator.halves) == 0


def test_a_delay_that_is_not_served_any_more_does_not_keep_a_message_back() -> None:
    bench = EscrowBench()
    bench.broker.delayed_messages._config = DelayConfig(timer_delay_max_s=2**31 - 1)
    bench.broker.handle(bench.channel, a_send(properties=TOO_LONG), bench.now_ms)
    bench.turn()
    sent = bench.channel.answer()
    assert sent.code == 0
    bench.broker.delayed_messages._config = DelayConfig()
    [half] = bench.coordinator.halves
    bench.end(HalfPosition(half.queue_offset, half.log_offset), COMMIT, group="p")
    assert bench.bodies() == [b"body"]
