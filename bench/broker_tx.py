"""Transactions: a half message, and its commit when the half is answered.

The commit is one-way, as in Java producers, so a dropped commit is not noticed by the producer.
After each run the benchmark waits until every committed message can be read, and reports how many
cannot.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.broker import NOTES, QUEUES, ResultTable, busy, shaped
from bench.figures import NOTHING, Figures, sent, summary, to_the_better
from bench.generator import Load, LoadFailed, Outcome
from bench.measure import Plan
from bench.memory import full_of_pages
from bench.samples import directory
from bench.servers import APACHE, OURS, Arena, Server, brokers, clients
from tests.interop.remoting import COMMIT, Client, ResponseError

TOPIC = "bench-tx"
VISIBLE_S = 10.0
COLUMNS = ("what", OURS, *APACHE.values(), "to the better Apache")
TX_NOTES = (
    "A transaction counts when its half was answered and its commit sent; with an acknowledged "
    "commit, when that was answered. `not visible`: committed, and still not to be read "
    f"{VISIBLE_S:.0f} s after the load.",
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Shape:
    connections: int
    depth: int
    acknowledged: bool = False

    def __str__(self) -> str:
        end = ", commit acknowledged" if self.acknowledged else ""
        return f"{self.connections} x {self.depth}{end}"


SHAPES = (Shape(64, 1), Shape(16, 32), Shape(64, 1, acknowledged=True))


def rows(plan: Plan) -> ResultTable:
    results: list[Sequence[str]] = []
    notes = [*TX_NOTES, *NOTES]
    for flush in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        with directory() as path, full_of_pages(path, plan):
            servers = brokers(path, {"flushDiskType": flush}, alone=plan.alone)
            with Arena(servers) as arena:
                refusals = {server.name: refusal(arena, server) for server in servers}
                able = [server for server in servers if not refusals[server.name]]
                warm(arena, able, plan)
                for shape in SHAPES:
                    figures = in_turns(arena, able, shape, plan)
                    results.append(_row(f"transactions, {flush}, {shape}", figures, refusals))
            notes.append(f"{flush}: {busy(arena)}")
    return ResultTable(results, notes, COLUMNS)


def refusal(arena: Arena, server: Server) -> str:
    """Return why this server has no transactions, or an empty text if each broker completes one."""
    with arena.turn(server), clients(server) as producers:
        return next(filter(None, map(_refusal, producers)), "")


def _refusal(producer: Client) -> str:
    unique = f"7F0000010001{next(_numbers):020X}"
    producer.create_topic(TOPIC, queues=QUEUES)
    try:
        half = producer.send_half(TOPIC, b"does it?", {"UNIQ_KEY": unique})
    except ResponseError as error:
        return f"refuses halves: code {error.response.code}, {error.response.remark}"
    ended = producer.end_transaction(half, COMMIT, topic=TOPIC)
    return "" if ended.code == 0 else f"refuses commits: code {ended.code}, {ended.remark}"


def warm(arena: Arena, servers: Sequence[Server], plan: Plan) -> None:
    for server in servers:
        if server.name in APACHE.values():
            load = replace(_load(SHAPES[0], plan), seconds=plan.java_warm_up_s)
            arena.put(load, server)


def in_turns(
    arena: Arena, servers: Sequence[Server], shape: Shape, plan: Plan
) -> dict[str, Figures]:
    outcomes: dict[str, list[Outcome]] = {server.name: [] for server in servers}
    failures: dict[str, Counter[str]] = {server.name: Counter() for server in servers}
    for _ in range(plan.rounds):
        for server in servers:
            before = _readable(arena, server)
            try:
                outcome = arena.put(_load(shape, plan), server)
            except LoadFailed as error:
                failures[server.name][f"a round, {error}"] += 1
                continue
            outcomes[server.name].append(outcome)
            missing = _missing(arena, server, before + outcome.messages_in_all)
            failures[server.name]["not visible"] += missing
    return {name: summary(outcomes[name], failures[name]) for name in outcomes}


def _load(shape: Shape, plan: Plan) -> Load:
    load = shaped("tx", plan, shape.connections, shape.depth)
    return replace(load, topic=TOPIC, acknowledged=shape.acknowledged)


def _readable(arena: Arena, server: Server) -> int:
    """Return how many messages of the topic are visible to consumers now."""
    with arena.turn(server), clients(server) as askers:
        return sum(map(_offsets, askers))


def _offsets(asker: Client) -> int:
    return sum(asker.max_offset(TOPIC, queue_id) for queue_id in range(QUEUES))


def _missing(arena: Arena, server: Server, expected: int) -> int:
    with arena.turn(server), clients(server) as askers:
        deadline_s = time.monotonic() + VISIBLE_S
        while True:
            readable = sum(map(_offsets, askers))
            if readable >= expected or time.monotonic() > deadline_s:
                return max(0, expected - readable)
            time.sleep(0.05)


def _row(what: str, results: dict[str, Figures], refusals: dict[str, str]) -> Sequence[str]:
    def cell(name: str) -> str:
        if name in results:
            return sent(results[name])
        return refusals.get(name) or NOTHING

    apache = [results[name] for name in APACHE.values() if name in results]
    better = to_the_better(results[OURS], apache) if OURS in results else NOTHING
    return (what, cell(OURS), *(cell(name) for name in APACHE.values()), better)
