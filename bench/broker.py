"""The broker under load, beside Apache RocketMQ 4.9.7 and 5.5.0 and a plain echo server."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.figures import (
    NOTHING,
    Figures,
    pulled,
    ratio,
    sent,
    summary,
    to_the_better,
)
from bench.generator import Load, LoadFailed, Outcome
from bench.measure import Plan
from bench.memory import full_of_pages
from bench.samples import directory
from bench.servers import (
    APACHE,
    ECHO,
    OURS,
    Arena,
    Echo,
    Server,
    brokers,
    clients,
    first_send_s,
    memory_bytes,
)

QUEUES = 4
SHAPES = ((1, 1), (16, 1), (64, 1), (16, 32))  # connections, requests in flight on each
PULL_SHAPES = ((16, 1), (16, 4))
COLUMNS = ("what", OURS, *APACHE.values(), "limit", "to the better Apache", "to the limit")
NOTES = (
    "Bodies of 1 KiB; 64 x 1 is 64 connections with one request under way on each. A cell: "
    "messages (or pulls) a second, p50, p99, processor time of the server for each message.",
    "Servers take turns, one moves at a time; a figure is the median of its rounds. Ratios to "
    "Apache take the better of the two for each figure by itself: a rate above 1 is better than "
    "theirs, p99 and CPU below 1 are.",
    "The generator shares the cores with the server. The limit is a compiled server that gives "
    "back 1 KiB and does nothing else. What was not answered with success stands in its cell as "
    "failed, warm-up included.",
)
MEMORY_NOTES = (
    "Memory is that of the broker's process; ours holds the name server too, Apache's is a process "
    "of its own. Mapped pages of the log count as resident; `own` (RssAnon) is without them.",
    "The start is the median of up to three, on an almost empty store, with Apache's name server "
    "already up.",
)


@dataclass(frozen=True)
class ResultTable:
    """A table of results, and the notes that a reader needs."""

    rows: list[Sequence[str]]
    notes: list[str]
    columns: Sequence[str] = COLUMNS


def rows(plan: Plan) -> ResultTable:
    """Measure start, memory, pulls, and sends with ASYNC_FLUSH."""
    with directory() as path, full_of_pages(path, plan):
        servers = brokers(path, alone=plan.alone)
        echo = Echo(path)
        with Arena([*servers, echo]) as arena:
            results = [start(arena, servers, plan), memory(arena, servers, "idle")]
            prepare(arena, servers, plan)
            for connections, depth in PULL_SHAPES:
                results.append(pull_row(arena, servers, plan, connections, depth))
            for connections, depth in PULL_SHAPES:
                results.append(pull_row(arena, servers, plan, connections, depth, queues=1))
            for connections, depth in SHAPES:
                results.append(send_row(arena, servers, echo, plan, connections, depth))
            results.append(memory(arena, servers, "after this load"))
        notes = [*NOTES, *MEMORY_NOTES, busy(arena)]
    return ResultTable(results, notes)


def sync_rows(plan: Plan) -> ResultTable:
    """Measure sends with SYNC_FLUSH."""
    with directory() as path, full_of_pages(path, plan):
        servers = brokers(path, {"flushDiskType": "SYNC_FLUSH"}, alone=plan.alone)
        echo = Echo(path)
        with Arena([*servers, echo]) as arena:
            prepare(arena, servers, plan)
            results = [
                send_row(arena, servers, echo, plan, connections, depth)
                for connections, depth in SHAPES
            ]
        results.append(raw_flush_row(path, plan))
        notes = [*NOTES, "`flushDiskType=SYNC_FLUSH` for every broker.", busy(arena)]
    return ResultTable(results, notes)


def in_turns(
    arena: Arena, turns: Mapping[str, tuple[Server, Load]], rounds: int
) -> dict[str, Figures]:
    """Return the figures of each server under its load, by name. The servers take turns."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in turns}
    failures: dict[str, Counter[str]] = {name: Counter() for name in turns}
    for _ in range(rounds):
        for name, (server, load) in turns.items():
            try:
                outcomes[name].append(arena.put(load, server))
            except (
                LoadFailed
            ) as error:  # a broker that fails must not cost the figures of the others
                failures[name][f"a round, {error}"] += 1
    return {name: summary(outcomes[name], failures[name]) for name in turns}


# --- rows ----------------------------------------------------------------------------------------


def send_row(
    arena: Arena, servers: list[Server], echo: Echo, plan: Plan, connections: int, depth: int
) -> Sequence[str]:
    load = shaped("send", plan, connections, depth)
    turns: dict[str, tuple[Server, Load]] = {server.name: (server, load) for server in servers}
    turns[ECHO] = (echo, replace(load, mode="echo"))
    results = in_turns(arena, turns, plan.rounds)
    return table_row(f"send, {connections} x {depth}", results, sent)


def pull_row(
    arena: Arena,
    servers: list[Server],
    plan: Plan,
    connections: int,
    depth: int,
    *,
    queues: int = QUEUES,
) -> Sequence[str]:
    """Pull from several queues, whose messages are interleaved in the log, or from one."""
    topic = "bench-pull" if queues == QUEUES else "bench-one"
    load = replace(shaped("pull", plan, connections, depth), topic=topic, queues=queues)
    results = in_turns(arena, {server.name: (server, load) for server in servers}, plan.rounds)
    what = "one queue" if queues == 1 else f"{queues} queues"
    return table_row(f"pull 32 messages of {what}, {connections} x {depth}", results, pulled)


def table_row(
    what: str, results: dict[str, Figures], words: Callable[[Figures], str]
) -> Sequence[str]:
    cells = [
        words(results[name]) if name in results else NOTHING for name in (OURS, *APACHE.values())
    ]
    echo = results.get(ECHO)
    return (
        what,
        *cells,
        sent(echo) if echo else NOTHING,
        to_the_better(
            results[OURS], [results[name] for name in APACHE.values() if name in results]
        ),
        f"rate {ratio(results[OURS].rate, echo.rate)}" if echo else NOTHING,
    )


def start(arena: Arena, servers: list[Server], plan: Plan) -> Sequence[str]:
    """Measure the start on a nearly empty store."""
    took: dict[str, float] = {}
    for server in servers:
        with arena.turn(server):
            tries = [first_send_s(server) for _ in range(min(plan.rounds, 3))]
            took[server.name] = statistics.median(tries)
    theirs = [took[name] for name in APACHE.values() if name in took]
    cells = [
        f"{took[name]:.2f} s" if name in took else NOTHING for name in (OURS, *APACHE.values())
    ]
    better = ratio(took[OURS], min(theirs)) if theirs else NOTHING
    return ("start of the process to the first accepted send", *cells, NOTHING, better, NOTHING)


def memory(arena: Arena, servers: list[Server], when: str) -> Sequence[str]:
    mebibyte = 1 << 20
    resident: dict[str, int] = {}
    cells: dict[str, str] = {}
    for server in servers:
        with arena.turn(server):
            if when == "idle":
                time.sleep(2)  # let it settle: a JVM is still compiling
            pid = server.pids[0]
            resident[server.name] = memory_bytes(pid)
            own = memory_bytes(pid, "RssAnon")
            cells[server.name] = (
                f"{resident[server.name] // mebibyte:,} MiB, own {own // mebibyte:,} MiB"
            )
    theirs = [resident[name] for name in APACHE.values() if name in resident]
    return (
        f"resident memory, {when}",
        *(cells.get(name, NOTHING) for name in (OURS, *APACHE.values())),
        NOTHING,
        ratio(resident[OURS], min(theirs)) if theirs else NOTHING,
        NOTHING,
    )


# --- before the first measurement ----------------------------------------------------------------


def prepare(arena: Arena, servers: list[Server], plan: Plan) -> None:
    """Create topics with equal numbers of queues, send messages to pull, warm up the JVMs."""
    for server in servers:
        with arena.turn(server), clients(server) as admins:
            for admin in admins:
                for topic in ("bench", "bench-pull"):
                    admin.create_topic(topic, queues=QUEUES)
                admin.create_topic("bench-one", queues=1)
        fill = replace(shaped("send", plan, 16, 32), topic="bench-pull", seconds=1)
        arena.put(fill, server)
        arena.put(replace(fill, topic="bench-one", queues=1), server)
        if server.name in APACHE.values():
            warm_java(arena, server, plan, "send")
            arena.put(replace(shaped("pull", plan, 16, 1), topic="bench-pull"), server)


def warm_java(arena: Arena, server: Server, plan: Plan, mode: str) -> None:
    arena.put(replace(shaped(mode, plan, 64, 1), seconds=plan.java_warm_up_s), server)


def shaped(mode: str, plan: Plan, connections: int, depth: int) -> Load:
    return Load(
        mode,
        connections=connections,
        depth=depth,
        seconds=plan.seconds,
        warm_up_s=plan.warm_up_s,
        queues=QUEUES,
    )


def busy(arena: Arena) -> str:
    """Return a note on how much CPU other processes used during the measurement."""
    most = max(arena.others_cores, default=0.0)
    middle = statistics.median(arena.others_cores or [0.0])
    return f"Others used {middle:.1f} cores (median of all measurements) and at most {most:.1f}."


def raw_flush_row(path: Path, plan: Plan) -> Sequence[str]:
    """Measure flushes on an idle disk: the limit of one connection with one request."""
    block = b"x" * 1024
    descriptor = os.open(path / "raw", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 64 << 20)
    os.fsync(descriptor)
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < plan.seconds:
        os.pwrite(descriptor, block, count * len(block) % (64 << 20))
        os.fdatasync(descriptor)
        count += 1
    os.close(descriptor)
    blank = [NOTHING] * (1 + len(APACHE))
    what = "raw: pwrite of 1 KiB and fdatasync, one after the other"
    return (what, *blank, f"{count / took:,.0f}/s", NOTHING, NOTHING)
