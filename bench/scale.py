"""How start, memory and latency grow with topics, connections and groups."""

from __future__ import annotations

import contextlib
import json
import resource
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.others import Latency, latency_of_others, own_mib
from bench.servers import EscrowMQ, client, first_send_s, lay_topics
from tests.interop.remoting import Client
from tests.support.brokers import start_pull

PIPELINED = 200
SETTINGS = {"escrowConnectionsMax": 11_000, "serverChannelMaxIdleTimeSeconds": 3600}
COLUMNS = ("of", "how many", "start", "own memory", "latency of others, p50 / p99", "to the first")
SIZES = {
    "topics": (1, 100, 10_000),
    "connections": (1, 100, 10_000),
    "groups": (1, 100, 1_000),
}
QUICK_SIZES = {"topics": (1, 100), "connections": (1, 100), "groups": (1, 20)}


@dataclass(frozen=True)
class Figure:
    start_s: float
    mib: float
    others: Latency


def rows(plan: Plan) -> ResultTable:
    allow_files()
    report: list[Sequence[str]] = []
    for what, sizes in (QUICK_SIZES if plan.quick else SIZES).items():
        first: Figure | None = None
        for count in sizes:
            figure = measured(KINDS[what], count, plan)
            first = first or figure
            report.append(row(what, count, figure, first))
    notes = [
        "Topics have a message each; connections have each sent a heartbeat; a group has a member "
        "on a connection of its own, with a pull that waits.",
        "Start: from the command to the first message taken, after a stop in order.",
        "Own memory: resident, without mapped files. Latency: one client that sends 200 bytes and "
        "waits, written in Python, its own time included.",
        f"Files on {_file_system()}.",
        "To the first: start, memory and p50 as ratios to the first row of the same kind.",
    ]
    return ResultTable(report, notes, COLUMNS)


def _file_system() -> str:
    place = Path(tempfile.gettempdir()).resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, kind = max((one for one in mounts if place.is_relative_to(one[0])), key=lambda m: len(m[0]))
    return kind


def row(what: str, count: int, figure: Figure, first: Figure) -> Sequence[str]:
    ratios = (
        figure.start_s / first.start_s,
        figure.mib / first.mib,
        figure.others.p50_ms / first.others.p50_ms,
    )
    return (
        what,
        f"{count:,}",
        f"{figure.start_s:.2f} s",
        f"{figure.mib:.0f} MiB",
        str(figure.others),
        " / ".join(f"{ratio:.2f}" for ratio in ratios),
    )


Filled = Callable[[EscrowMQ, int], "contextlib.AbstractContextManager[None]"]


def measured(filled: Filled, count: int, plan: Plan) -> Figure:
    """Measure a server of that size: first the start, then memory and latency."""
    with tempfile.TemporaryDirectory(prefix="escrowmq-scale-") as name:
        server = EscrowMQ(Path(name), SETTINGS)
        if filled is topics:
            lay_topics(server.data, topic_names(count), queues=1)
        server.start()
        try:
            with filled(server, count):
                pass
            start_s = first_send_s(server)
            with filled(server, count):
                others = latency_of_others(server, plan.seconds)
                return Figure(start_s, own_mib(server), others)
        finally:
            server.stop()


def topic_names(count: int) -> list[str]:
    return [f"bench-topic-{number}" for number in range(count)]


@contextlib.contextmanager
def topics(server: EscrowMQ, count: int) -> Iterator[None]:
    with client(server, timeout_s=120) as sender:
        names = topic_names(count)
        for begin in range(0, count, PIPELINED):
            part = names[begin : begin + PIPELINED]
            for name in part:
                sender.send_request(310, _fields(name), b"x", flag=0)
            for _ in part:
                sender.next_frame()
        yield


def _fields(topic: str) -> dict[str, object]:
    return {
        "a": "bench",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": 0,
        "f": 0,
        "g": 0,
        "h": 0,
        "i": "",
        "j": 0,
        "k": False,
        "m": False,
    }


@contextlib.contextmanager
def connections(server: EscrowMQ, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number in range(count):
            line = stack.enter_context(client(server, timeout_s=120))
            line.heartbeat(f"client-{number}", producer_groups=(f"group-{number % 100}",))
        yield


@contextlib.contextmanager
def groups(server: EscrowMQ, count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(client(server, timeout_s=120))
        admin.create_topic("bench-groups", queues=1)
        end = admin.max_offset("bench-groups", 0)
        for number in range(count):
            line = stack.enter_context(client(server, timeout_s=120))
            join(line, f"bench-group-{number}")
            start_pull(line, "bench-groups", end, group=f"bench-group-{number}", wait_ms=600_000)
        yield


def join(line: Client, group: str) -> None:
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [{"topic": "bench-groups", "subString": "*", "subVersion": 1}],
    }
    beat = {"clientID": group, "producerDataSet": [], "consumerDataSet": [consumer]}
    line.expect(34, body=json.dumps(beat).encode())


KINDS: dict[str, Filled] = {"topics": topics, "connections": connections, "groups": groups}


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
