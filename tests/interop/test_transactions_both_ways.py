"""Open transactions continue when another broker takes over the directory: Apache's or escrowmq.

The new broker checks the open halves and no others; what was decided stays decided. The tests count
the checks that a producer receives, and the messages in the queues of its topic. CI has each test
once, and over all tests both releases and both ways to end a broker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.interop.apache import ApacheRocketMQ
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.producers import GROUP, QUEUES, STRANDED_TOPIC, TOPIC, Producer
from tests.interop.releases import with_cases_and_releases, with_releases
from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, SendResult
from tests.interop.samples import now_ms

pytestmark = [pytest.mark.apache, pytest.mark.slow]

SIZES: dict[str, object] = {"mappedFileSizeCommitLog": 16 << 20}
FAST_CHECKS: dict[str, object] = {
    **SIZES,
    "transactionCheckInterval": 1_000,
    "transactionTimeOut": 1_000,
}
HOUR_MS = 3_600_000
NO_CHECKS: dict[str, object] = {
    **SIZES,
    "transactionCheckInterval": HOUR_MS,
    "transactionTimeOut": HOUR_MS,
}
# Several check intervals. Only time can show that the broker sends no further check.
NO_MORE_CHECKS_S = 6.0
SHUTDOWNS = {"stopped": ("stopped",), "killed": ("killed",)}
CHECKED_GROUP, STRANDED_GROUP = "checked-group", "stranded-group"


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


def decide_open_halves(
    address: str, verdicts: Mapping[str, int], delivered: Counter[str]
) -> Counter[str]:
    """Respond to the checks of a broker that took over the directory. Returns these checks.

    `verdicts` has every open half. In the end the topic must contain the messages `delivered`.
    """
    with Producer(address, GROUP, CHECKED_GROUP, STRANDED_GROUP) as producer:
        producer.respond_until(lambda: producer.checks.keys() >= verdicts.keys(), verdicts)
        producer.respond_to_checks(verdicts, seconds=NO_MORE_CHECKS_S)
        assert producer.delivered() == delivered
        return producer.checks


# --- our broker, then Apache's, then ours --------------------------------------------------------


@with_cases_and_releases(("shutdown",), SHUTDOWNS, in_ci=[("4.9.7", "stopped")])
def test_apache_checks_exactly_the_halves_that_we_left_open(
    shutdown: str, version: str, tmp_path: Path
) -> None:
    settings = {
        **NO_CHECKS,
        "transactionCheckMax": 2,
        "escrowTimeOuts": f"{CHECKED_GROUP}=100;{STRANDED_GROUP}=100",
        "escrowCheckIntervals": f"{STRANDED_GROUP}=100",
    }
    with EscrowMQ(tmp_path, settings) as escrowmq:
        escrowmq.create_topic(TOPIC, queues=QUEUES)
        with Producer(escrowmq.address, GROUP, CHECKED_GROUP, STRANDED_GROUP) as producer:
            stranded = send_to_ours(producer)
        escrowmq.stop()
        escrowmq.settings = dict(NO_CHECKS)
        escrowmq.start()
        with Producer(escrowmq.address, GROUP, CHECKED_GROUP, STRANDED_GROUP) as producer:
            resume(producer, *stranded)
            before = producer.delivered()
        if shutdown == "killed":
            escrowmq.kill()
    committed = [*numbered("committed", 40), *numbered("together", 3)]
    assert before == Counter([*committed, "checked-commits", "resumed-commits"])

    open_halves = {"open-0": COMMIT, "open-1": ROLLBACK, "open-2": COMMIT}
    open_halves |= {"checked-0": COMMIT, "checked-1": ROLLBACK, "resumed": COMMIT}
    after = before + with_verdict(open_halves, COMMIT)
    apache_settings: dict[str, object] = {**FAST_CHECKS, "transactionOpBatchInterval": 100}
    with ApacheRocketMQ(version, tmp_path, apache_settings) as rocketmq:
        checks = decide_open_halves(rocketmq.address, open_halves, after)
        assert checks == Counter(open_halves.keys())
        rocketmq.kill()

    with EscrowMQ(tmp_path, FAST_CHECKS) as escrowmq:
        assert decide_open_halves(escrowmq.address, {}, after) == Counter()


def with_verdict(verdicts: Mapping[str, int], verdict: int) -> Counter[str]:
    return Counter(name for name in verdicts if verdicts[name] == verdict)


def send_to_ours(producer: Producer) -> list[SendResult]:
    """Park halves that end in every possible way. Returns two that are stranded.

    The very first half stays open, so that Apache's cursor cannot pass it.
    """
    producer.park("open-0")
    producer.park_and_end(numbered("committed", 20), COMMIT)
    producer.park_and_end(numbered("rolled-back", 3), ROLLBACK)
    producer.park("open-1")
    decide(producer, [producer.park(name) for name in numbered("together", 3)], COMMIT)
    decide(producer, [producer.park(name) for name in numbered("rolled-together", 2)], ROLLBACK)
    verdicts = dict.fromkeys(numbered("checked", 2), UNKNOWN)
    verdicts |= {"checked-commits": COMMIT, "checked-rolls-back": ROLLBACK}
    for name in verdicts:
        producer.park(name, group=CHECKED_GROUP)
    for name in numbered("stranded", 2):
        producer.park(name, group=STRANDED_GROUP)
    stranded = [
        producer.park(name, group=STRANDED_GROUP) for name in ("resumed", "resumed-commits")
    ]
    producer.respond_until(
        lambda: (
            producer.checks.keys() >= verdicts.keys()
            and producer.client.max_offset(STRANDED_TOPIC, 0) == 4
            and producer.delivered()["checked-commits"] == 1
        ),
        verdicts,
    )
    producer.park_and_end(numbered("committed", 40)[20:], COMMIT)
    producer.park("open-2")
    return stranded


def resume(producer: Producer, resumed: SendResult, resumed_commits: SendResult) -> None:
    """Resume stranded halves as an operator does: the broker appends them again.

    The second is then committed by the position of its first copy.
    """
    for half in (resumed, resumed_commits):
        producer.client.expect(3714, {"transactionId": half.transaction_id, "reason": "a test"})
    producer.end(resumed_commits, COMMIT, group=STRANDED_GROUP)


def decide(producer: Producer, halves: list[SendResult], verdict: int) -> None:
    """Decide several halves with one request, which only EscrowMQ supports."""
    positions = [(half.queue_offset, half.log_offset) for half in halves]
    fields = {"producerGroup": GROUP, "commitOrRollback": verdict}
    producer.client.expect(3701, fields, json.dumps({"halves": positions}).encode())


# --- Apache's broker, then ours ------------------------------------------------------------------

DECIDED_BY_CHECK = {"checked-commits": COMMIT, "checked-rolls-back": ROLLBACK}
OPEN_HALVES = {"checked-0": COMMIT, "checked-1": ROLLBACK, "open-0": COMMIT, "open-1": ROLLBACK}


@with_cases_and_releases(("shutdown",), SHUTDOWNS, in_ci=[("5.5.0", "killed")])
def test_we_check_exactly_the_halves_that_apache_left_open(
    shutdown: str, version: str, tmp_path: Path
) -> None:
    settings = {
        **FAST_CHECKS,
        "transactionCheckMax": 1_000,  # Apache keeps checking while it stops, for many seconds
        "transactionOpBatchInterval": 100,
        "flushConsumerOffsetInterval": 500,
    }
    with ApacheRocketMQ(version, tmp_path, settings) as rocketmq:
        with Producer(rocketmq.address) as producer:
            send_to_apache(producer)
            before = producer.delivered()
        if shutdown == "killed":
            rocketmq.kill()
    assert before == Counter([*numbered("committed", 4), "checked-commits", "late"])

    after = before + with_verdict(OPEN_HALVES, COMMIT)
    with EscrowMQ(tmp_path, FAST_CHECKS) as escrowmq:
        checks = decide_open_halves(escrowmq.address, OPEN_HALVES, after)
        assert checks == Counter(OPEN_HALVES.keys())
        escrowmq.kill()
        escrowmq.start()
        assert decide_open_halves(escrowmq.address, {}, after) == Counter()


def send_to_apache(producer: Producer) -> None:
    """Park halves that end in every possible way.

    Apache appends a copy of a half for each check, and an end may name any of the copies.
    """
    producer.client.create_topic(TOPIC, queues=QUEUES)
    # Apache discards these at once because of their age.
    for name in numbered("discarded", 2):
        producer.park(name, born_ms=now_ms() - 96 * HOUR_MS)
    producer.respond_until(lambda: producer.client.max_offset(STRANDED_TOPIC, 0) == 2, {})
    producer.park_and_end(numbered("committed", 4), COMMIT)
    producer.park_and_end(numbered("rolled-back", 2), ROLLBACK)
    verdicts = {**DECIDED_BY_CHECK, **dict.fromkeys(numbered("checked", 2), UNKNOWN)}
    for name in verdicts:
        producer.park(name)
    late = producer.park("late")
    producer.respond_until(
        lambda: (
            producer.checks.keys() >= {*verdicts, "late"}
            and producer.delivered()["checked-commits"] == 1
        ),
        verdicts,
    )
    producer.end(late, COMMIT)  # names the first copy, while the second copy is still open
    # Apache writes ops and cursors in the background, which a client cannot observe: give it time.
    producer.respond_to_checks(verdicts, seconds=1.0)
    for name in numbered("open", 2):
        producer.park(name)


@with_releases("version", in_ci=["5.5.0"])
def test_a_half_that_apache_delivered_is_decided_although_its_op_was_lost(
    version: str, tmp_path: Path
) -> None:
    # 5.5.0 collects ops in memory: after a kill only the delivered message shows the decision.
    with EscrowMQ(tmp_path, NO_CHECKS) as escrowmq:
        escrowmq.create_topic(TOPIC, queues=QUEUES)
        with Producer(escrowmq.address) as producer:
            parked_at_ours = [producer.park(name) for name in numbered("parked-at-ours", 5)]
            producer.park("open-at-ours")
    settings = {**NO_CHECKS, "transactionOpBatchInterval": HOUR_MS}
    with ApacheRocketMQ(version, tmp_path, settings) as rocketmq:
        with Producer(rocketmq.address) as producer:
            producer.park("open-0")
            for half in parked_at_ours:
                producer.end(half, COMMIT)
            producer.park_and_end(numbered("committed", 50), COMMIT)
            producer.park("open-1")
        rocketmq.kill()
    open_halves = {"open-at-ours": COMMIT, "open-0": COMMIT, "open-1": ROLLBACK}
    with EscrowMQ(tmp_path, FAST_CHECKS) as escrowmq:
        committed = [*numbered("committed", 50), *numbered("parked-at-ours", 5)]
        after = Counter([*committed, "open-at-ours", "open-0"])
        checks = decide_open_halves(escrowmq.address, open_halves, after)
        assert checks == Counter(open_halves.keys())
