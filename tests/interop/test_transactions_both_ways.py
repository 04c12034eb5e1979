"""Open transactions move with their directory: from us to Apache RocketMQ, and back to us.

Whoever takes a directory over asks about what is open, and about nothing else; what was decided
stays decided. Judged by what a producer is asked and by what lies in the queues of its topic.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.interop.apache import ApacheRocketMQ
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.producers import GROUP, QUEUES, STRANDED_TOPIC, TOPIC, Producer
from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, SendResult
from tests.interop.samples import now_ms

pytestmark = [pytest.mark.apache, pytest.mark.slow]

SIZES: dict[str, object] = {"mappedFileSizeCommitLog": 16 << 20}
HASTY: dict[str, object] = {**SIZES, "transactionCheckInterval": 1_000, "transactionTimeOut": 1_000}
HOUR_MS = 3_600_000
QUIET: dict[str, object] = {
    **SIZES,
    "transactionCheckInterval": HOUR_MS,
    "transactionTimeOut": HOUR_MS,
}
AFTERWARDS_S = 6.0  # several rounds: nobody may be asked about anything any more
ASKED, STRANDS = "asked-group", "strands-group"


def several(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


def taken_over(*endings: str) -> pytest.MarkDecorator:
    """Both releases, every ending; CI has time for the newest release and the first ending."""
    return pytest.mark.parametrize(
        ("version", "ending"),
        [
            pytest.param(
                version,
                ending,
                marks=[] if (version, ending) == ("5.5.0", endings[0]) else pytest.mark.nightly,
            )
            for version in ("5.5.0", "4.9.7")
            for ending in endings
        ],
        indirect=["version"],
    )


def plan_of(names: Iterable[str], verdict: int) -> dict[str, int]:
    return dict.fromkeys(names, verdict)


def take_over(address: str, plan: Mapping[str, int], expected: Counter[str]) -> Counter[str]:
    """What is asked by whoever has the directory now. `plan` is what is open, and how it ends."""
    with Producer(address, GROUP, ASKED, STRANDS) as producer:
        producer.listen_until(lambda: producer.asked.keys() >= plan.keys(), plan)
        producer.listen(plan, seconds=AFTERWARDS_S)
        assert producer.delivered() == expected
        return producer.asked


# --- ours, then Apache's, then ours --------------------------------------------------------------


@taken_over("stopped", "killed")
def test_apache_asks_about_what_we_left_open_and_only_that(
    ending: str, version: str, tmp_path: Path
) -> None:
    settings = {
        **QUIET,
        "transactionCheckMax": 2,
        "escrowTimeOuts": f"{ASKED}=100;{STRANDS}=100",
        "escrowCheckIntervals": f"{STRANDS}=100",
    }
    with EscrowMQ(tmp_path, settings) as ours:
        ours.create_topic(TOPIC, queues=QUEUES)
        with Producer(ours.address, GROUP, ASKED, STRANDS) as producer:
            moves = lay_ours(producer)
        ours.stop()
        ours.settings = dict(QUIET)
        ours.start()
        with Producer(ours.address, GROUP, ASKED, STRANDS) as producer:
            resume(producer, *moves)
            before = producer.delivered()
        if ending == "killed":
            ours.kill()
    settled = [*several("committed", 40), *several("together", 3), "asked-commits", "moves-commits"]
    assert before == Counter(settled)

    plan = {"open-0": COMMIT, "open-1": ROLLBACK, "open-2": COMMIT}
    plan |= {"asked-0": COMMIT, "asked-1": ROLLBACK, "moves": COMMIT}
    after = before + Counter(name for name, verdict in plan.items() if verdict == COMMIT)
    theirs: dict[str, object] = {**HASTY, "transactionOpBatchInterval": 100}
    with ApacheRocketMQ(version, tmp_path, theirs) as rocketmq:
        assert take_over(rocketmq.address, plan, after) == Counter(plan.keys())
        rocketmq.kill()

    with EscrowMQ(tmp_path, HASTY) as ours:
        assert take_over(ours.address, {}, after) == Counter()


def lay_ours(producer: Producer) -> list[SendResult]:
    """Something of everything; the first half of all stays open, so that no cursor passes it."""
    producer.park("open-0")
    producer.settle(several("committed", 20), COMMIT)
    producer.settle(several("rolled", 3), ROLLBACK)
    producer.park("open-1")
    decide(producer, [producer.park(name) for name in several("together", 3)], COMMIT)
    decide(producer, [producer.park(name) for name in several("apart", 2)], ROLLBACK)
    for name in (*several("asked", 2), "asked-commits", "asked-rolls-back"):
        producer.park(name, group=ASKED)
    for name in several("strands", 2):
        producer.park(name, group=STRANDS)
    moves = [producer.park(name, group=STRANDS) for name in ("moves", "moves-commits")]
    plan = plan_of(several("asked", 2), UNKNOWN)
    plan |= {"asked-commits": COMMIT, "asked-rolls-back": ROLLBACK}
    producer.listen_until(
        lambda: (
            producer.asked.keys() >= plan.keys()
            and producer.client.max_offset(STRANDED_TOPIC, 0) == 4
            and producer.delivered()["asked-commits"] == 1
        ),
        plan,
    )
    producer.settle(several("committed", 40)[20:], COMMIT)
    producer.park("open-2")
    return moves


def resume(producer: Producer, moves: SendResult, commits: SendResult) -> None:
    """By an operator: each is appended again. One is committed by its first place after all."""
    for half in (moves, commits):
        producer.client.expect(3714, {"transactionId": half.transaction_id, "reason": "a test"})
    producer.end(commits, COMMIT, group=STRANDS)


def decide(producer: Producer, halves: list[SendResult], verdict: int) -> None:
    """One decision over many, as only we know it."""
    places = [(half.queue_offset, half.log_offset) for half in halves]
    fields = {"producerGroup": GROUP, "commitOrRollback": verdict}
    producer.client.expect(3701, fields, json.dumps({"halves": places}).encode())


# --- Apache's, then ours -------------------------------------------------------------------------

BY_CHECK = {"checked-commits": COMMIT, "checked-rolls-back": ROLLBACK}
OPEN = {"checked-0": COMMIT, "checked-1": ROLLBACK, "open-0": COMMIT, "open-1": ROLLBACK}


@taken_over("stopped", "killed")
def test_we_ask_about_what_apache_left_open_and_only_that(
    ending: str, version: str, tmp_path: Path
) -> None:
    settings = {
        **HASTY,
        "transactionCheckMax": 1_000,  # it goes on checking while it stops, for many seconds
        "transactionOpBatchInterval": 100,
        "flushConsumerOffsetInterval": 500,
    }
    with ApacheRocketMQ(version, tmp_path, settings) as rocketmq:
        with Producer(rocketmq.address) as producer:
            lay_theirs(producer)
            before = producer.delivered()
        if ending == "killed":
            rocketmq.kill()
    assert before == Counter([*several("committed", 4), "checked-commits", "late"])

    after = before + Counter(name for name, verdict in OPEN.items() if verdict == COMMIT)
    with EscrowMQ(tmp_path, HASTY) as ours:
        assert take_over(ours.address, OPEN, after) == Counter(OPEN.keys())
        ours.kill()
        ours.start()
        assert take_over(ours.address, {}, after) == Counter()


def lay_theirs(producer: Producer) -> None:
    """Every check makes a copy of its half there, and an end may name any of them."""
    producer.client.create_topic(TOPIC, queues=QUEUES)
    for name in several("discarded", 2):  # at once: they say that they are four days old
        producer.park(name, born_ms=now_ms() - 96 * HOUR_MS)
    producer.listen_until(lambda: producer.client.max_offset(STRANDED_TOPIC, 0) == 2, {})
    producer.settle(several("committed", 4), COMMIT)
    producer.settle(several("rolled", 2), ROLLBACK)
    plan = {**BY_CHECK, **plan_of(several("checked", 2), UNKNOWN)}
    for name in plan:
        producer.park(name)
    late = producer.park("late")
    producer.listen_until(
        lambda: (
            producer.asked.keys() >= {*plan, "late"}
            and producer.delivered()["checked-commits"] == 1
        ),
        plan,
    )
    producer.end(late, COMMIT)  # it names the first copy; the second is open still
    producer.listen(plan, seconds=1.0)  # until ops and cursors are on their way
    for name in several("open", 2):
        producer.park(name)


@taken_over("killed")
def test_we_know_what_apache_delivered_though_its_ops_were_lost(
    ending: str, version: str, tmp_path: Path
) -> None:
    # 5.x gathers ops in memory; nothing but the delivered message says that it is over.
    with EscrowMQ(tmp_path, QUIET) as ours:
        ours.create_topic(TOPIC, queues=QUEUES)
        with Producer(ours.address) as producer:
            parked_here = [producer.park(name) for name in several("parked-here", 5)]
            producer.park("open-here")
    settings = {**QUIET, "transactionOpBatchInterval": HOUR_MS}
    with ApacheRocketMQ(version, tmp_path, settings) as rocketmq:
        with Producer(rocketmq.address) as producer:
            producer.park("open-0")
            for half in parked_here:
                producer.end(half, COMMIT)
            producer.settle(several("committed", 50), COMMIT)
            producer.park("open-1")
        rocketmq.kill()
    plan = {"open-here": COMMIT, "open-0": COMMIT, "open-1": ROLLBACK}
    with EscrowMQ(tmp_path, HASTY) as ours:
        settled = [*several("committed", 50), *several("parked-here", 5)]
        after = Counter([*settled, "open-here", "open-0"])
        assert take_over(ours.address, plan, after) == Counter(plan.keys())
