"""Several broker processes beside one, and beside Apache RocketMQ, on the same cores.

Each broker gets the same number of connections; rates are those of all, and p99 is over all
responses of all brokers.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import broker, broker_tx
from bench.broker import NOTES, ResultTable, busy, prepare, shaped
from bench.broker_tx import TX_NOTES, Shape
from bench.figures import NOTHING, Figures, sent, to_the_better
from bench.measure import Plan
from bench.memory import full_of_pages
from bench.samples import directory
from bench.servers import APACHE, OURS, Arena, EscrowMQ, Server, brokers

COUNT = 2
MANY = f"{OURS} --brokers {COUNT}"
NEWEST = list(APACHE.values())[-1]
SHAPES = (Shape(64, 1), Shape(16, 32))
COLUMNS = ("what", MANY, OURS, *APACHE.values(), "to one of ours", f"to {NEWEST}")
COUNT_NOTE = (
    f"`{MANY}`: {COUNT} broker processes with their supervisor, which is their name server. Half "
    "of the connections go to each; rates and processor time are summed, p99 is over all answers."
)


def rows(plan: Plan) -> ResultTable:
    with directory() as path, full_of_pages(path, plan):
        several = EscrowMQ(path / "several", {}, brokers=COUNT)
        servers = [several, *brokers(path, alone=plan.alone)]
        with Arena(servers) as arena:
            prepare(arena, servers, plan)
            results = [_sends(arena, servers, plan, shape) for shape in SHAPES]
            refusals = {server.name: broker_tx.refusal(arena, server) for server in servers}
            able = [server for server in servers if not refusals[server.name]]
            broker_tx.warm(arena, able, plan)
            for shape in SHAPES:
                figures = broker_tx.in_turns(arena, able, shape, plan)
                results.append(_row(f"transactions, {shape}", figures, refusals))
        notes = [COUNT_NOTE, *TX_NOTES, *NOTES[:1], busy(arena)]
    return ResultTable(results, notes, COLUMNS)


def _sends(arena: Arena, servers: Sequence[Server], plan: Plan, shape: Shape) -> Sequence[str]:
    load = shaped("send", plan, shape.connections, shape.depth)
    turns = {server.name: (server, load) for server in servers}
    return _row(f"send, {shape}", broker.in_turns(arena, turns, plan.rounds), {})


def _row(what: str, results: dict[str, Figures], refusals: dict[str, str]) -> Sequence[str]:
    def cell(name: str) -> str:
        return sent(results[name]) if name in results else refusals.get(name) or NOTHING

    def beside(name: str) -> str:
        both = name in results and MANY in results
        return to_the_better(results[MANY], [results[name]]) if both else NOTHING

    return (what, *map(cell, COLUMNS[1:-2]), beside(OURS), beside(NEWEST))
