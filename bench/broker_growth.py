"""Whether a message costs more with many topics or with a long log.

Each broker runs twice, once with a small and once with a large store, and both take turns.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.broker import NOTES, QUEUES, ResultTable, busy, in_turns, shaped, warm_java
from bench.figures import NOTHING, Figures, failed, ratio
from bench.generator import Load
from bench.measure import Plan
from bench.samples import directory
from bench.servers import OURS, Arena, Server, client, kinds, lay_topics

COLUMNS = ("what", "broker", "small", "large", "ratio of CPU", "ratio of rate")
SMALL_LOG_GIB = 1.0
SPARE_GIB = 8.0  # for the small log, the queues and the index, and what the measurements write
GIB = 1 << 30
GROWTH_NOTES = (
    "A cell: processor time of the server for each message, and messages a second, at 64 x 1.",
    "Topics have one queue each here, and messages go to them in turn. Logs are of 1 KiB messages.",
)

Pair = tuple[Server, Server]


def rows(plan: Plan) -> ResultTable:
    results: list[Sequence[str]] = []
    notes = [*GROWTH_NOTES, NOTES[2]]
    for measure in (_topics, _log):
        for make in kinds(alone=plan.alone):
            with directory() as path:
                row, note = measure(
                    path, (make(path / "small", {}), make(path / "large", {})), plan
                )
            results.append(row)
            notes += [note] if note else []
    return ResultTable(results, notes, COLUMNS)


def _topics(path: Path, pair: Pair, plan: Plan) -> tuple[Sequence[str], str]:
    small, large = pair
    names = [f"bench{number}" for number in range(plan.topics)]
    lay_topics(small.data, names[:1], queues=1)
    lay_topics(large.data, names, queues=1)
    single_topic = replace(shaped("send", plan, 64, 1), topics=1, queues=1)
    with Arena(pair) as arena:
        many_topics = replace(single_topic, topics=plan.topics)
        for server, load in ((small, single_topic), (large, many_topics)):
            if server.name != OURS:
                arena.put(replace(load, seconds=plan.java_warm_up_s), server)
            _touch(arena, server, load)
        results = in_turns(
            arena, {"small": (small, single_topic), "large": (large, many_topics)}, plan.rounds
        )
        what = f"1 topic, {plan.topics:,} topics"
        return _row(what, small.name, results), f"{small.name}, topics: {busy(arena)}"


def _touch(arena: Arena, server: Server, load: Load) -> None:
    """Send to every queue, so that its file exists before the measurement."""
    taken = 0
    while taken < 2 * load.topics:
        report = arena.put(load, server)
        if report.errors or report.messages_in_all == 0:
            raise RuntimeError(f"{server.name} refuses messages to {load.topics} topics: {report}")
        taken += report.messages_in_all


def _log(path: Path, pair: Pair, plan: Plan) -> tuple[Sequence[str], str]:
    small, large = pair
    small_gib = min(SMALL_LOG_GIB, plan.log_gib / 4)
    what = f"log of {small_gib:g} GiB, of {plan.log_gib:g} GiB"
    needed_gib, free_gib = plan.log_gib * 1.3 + SPARE_GIB, shutil.disk_usage(path).free / GIB
    if free_gib < needed_gib:
        why = f"not measured: {free_gib:.0f} GiB free, {needed_gib:.0f} GiB needed"
        return (what, small.name, why, NOTHING, NOTHING, NOTHING), ""
    load = shaped("send", plan, 64, 1)
    with Arena(pair) as arena:
        for server, gib in ((small, small_gib), (large, plan.log_gib)):
            with arena.turn(server), client(server) as admin:
                admin.create_topic(load.topic, queues=QUEUES)
            if server.name != OURS:
                warm_java(arena, server, plan, "send")
            _fill(arena, server, load, int(gib * GIB))
        results = in_turns(arena, {"small": (small, load), "large": (large, load)}, plan.rounds)
        return _row(what, small.name, results), f"{small.name}, logs: {busy(arena)}"


def _fill(arena: Arena, server: Server, load: Load, log_bytes: int) -> None:
    while (left := log_bytes - _log_end(arena, server)) > 0:
        seconds = 5.0 if left > 2 * GIB else 0.5
        fast = replace(load, connections=16, depth=32, seconds=seconds, warm_up_s=0)
        if arena.put(fast, server).messages_in_all == 0:
            raise RuntimeError(f"{server.name} takes no more messages, {left:,} bytes are missing")


def _log_end(arena: Arena, server: Server) -> int:
    with arena.turn(server), client(server) as sender:
        return sender.send("bench", b"where does the log end?").log_offset


def _row(what: str, broker: str, results: dict[str, Figures]) -> Sequence[str]:
    small, large = results["small"], results["large"]
    return (
        what,
        broker,
        _cell(small),
        _cell(large),
        ratio(large.cpu_us, small.cpu_us),
        ratio(large.rate, small.rate),
    )


def _cell(figures: Figures) -> str:
    return f"{figures.cpu_us:.1f} us, {figures.rate:,.0f}/s{failed(figures)}"
