"""Our client beside those from PyPI, on the same broker: rate and CPU time.

    on EscrowMQ            the two wrappers of RocketMQ's C++ client
    on Apache RocketMQ     the official client, which speaks gRPC to a proxy in front of the broker

Each measurement is a separate process (`bench/client_driver.py`) in an environment that is created
on first use (`tests/interop/clients/environments.py`).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.broker import ResultTable
from bench.figures import NOTHING, ratio
from bench.measure import Plan
from bench.proxy import Proxied
from bench.servers import EscrowMQ
from tests.interop.clients import environments
from tests.interop.jars import Unavailable, unavailable_reason
from tests.interop.remoting import Client as Remoting

DRIVER: Final = Path(__file__).with_name("client_driver.py")
# By kind, with the message type that the official client requires.
TOPICS: Final = {
    "send": ("bench-send", "+message.type=NORMAL"),
    "transaction": ("bench-transaction", "+message.type=TRANSACTION"),
}
DRIVER_S: Final = 90.0  # besides the load itself
COLUMNS: Final = ("what", "beside", "ours", "it", "ours / it", "goal")
CPP_GOAL: Final = {"send": ">= 1"}
GRPC_GOAL: Final = {"send": ">= 3", "transaction": ">= 3"}


@dataclass(frozen=True)
class Load:
    what: str
    kind: str  # send or transaction
    way: str  # threads or flying
    count: int


LOADS: Final = (
    Load("sends, 1 thread", "send", "threads", 1),
    Load("sends, 16 threads", "send", "threads", 16),
    Load("sends, 256 in flight", "send", "flying", 256),
    Load("transactions, 1 thread", "transaction", "threads", 1),
    Load("transactions, 16 threads", "transaction", "threads", 16),
    Load("transactions, 256 in flight", "transaction", "flying", 256),
)


@dataclass
class Client:
    name: str  # its name in the driver
    title: str = ""
    packages: tuple[str, ...] = ()  # None: our own interpreter
    library_of: str = ""
    cannot: tuple[tuple[str, str], ...] = ()  # combinations that the client does not support
    rates: dict[Load, list[float]] = field(default_factory=dict)
    cpu_us: dict[Load, list[float]] = field(default_factory=dict)
    failed: dict[Load, int] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)  # errors of failed measurements
    lack: str = ""  # why it was not measured

    def python(self) -> list[str]:
        if not self.packages:
            return [sys.executable]
        return environments.python(self.name, self.packages, self.library_of)

    def measure(self, load: Load, address: str, plan: Plan, home: Path) -> None:
        if self.lack or (load.kind, load.way) in self.cannot:
            return
        warm_up_s = plan.warm_up_s
        command = [
            *self.python(),
            *(str(DRIVER), self.name, address, TOPICS[load.kind][0], load.kind, load.way),
            *(str(load.count), str(warm_up_s), str(plan.seconds)),
        ]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "HOME": str(home)},  # their logs
                cwd=home,
                capture_output=True,
                text=True,
                timeout=DRIVER_S + warm_up_s + plan.seconds,
                check=False,
            )
            report = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            self._fell(load, "it did not end")
            return
        except (ValueError, IndexError):
            self._fell(load, (done.stderr.strip().splitlines() or ["it said nothing"])[-1])
            return
        self.failed[load] = self.failed.get(load, 0) + int(report["failed"])
        self.rates.setdefault(load, []).append(report["done"] / report["seconds"])
        if report["done"]:
            self.cpu_us.setdefault(load, []).append(report["cpu_s"] * 1e6 / report["done"])

    def _fell(self, load: Load, why: str) -> None:
        self.failed[load] = self.failed.get(load, 0) + 1
        self.reasons.add(f"{self.title or 'ours'}, {load.what}: {why[-200:]}")

    def rate(self, load: Load) -> float:
        return statistics.median(self.rates[load]) if load in self.rates else 0.0

    def cell(self, load: Load) -> str:
        if self.lack:
            return NOTHING
        failed = self.failed.get(load, 0)
        words = f"; **failed: {failed:,}**" if failed else ""
        if not self.rate(load):
            return NOTHING + words
        cpu_us = statistics.median(self.cpu_us[load])
        return f"{self.rate(load):,.0f}/s, {cpu_us:.0f} us{words}"


def rows(plan: Plan) -> ResultTable:
    ours, theirs = Client("ours"), cpp_clients()
    ours_there, grpc = Client("ours"), grpc_client()
    make_ready([*theirs, grpc])
    lack = "as was wished" if plan.alone else unavailable_reason() or ""
    ours_there.lack = lack
    grpc.lack = grpc.lack or lack
    with tempfile.TemporaryDirectory(dir=os.environ.get("ESCROWMQ_BENCH_DIR")) as directory:
        here = Path(directory)
        server = EscrowMQ(here / "escrowmq", {})
        server.start()
        try:
            at = server.namesrv_address
            take_turns([(client, at) for client in (ours, *theirs)], server.port, plan, here)
        finally:
            server.stop()
        if not lack:
            on_apache(ours_there, grpc, plan, here)
    return table(ours, theirs, ours_there, grpc)


def cpp_clients() -> list[Client]:
    transactional = Client(
        "cpp-tx",
        "rocketmq-client-python 2.0.0 (C++)",
        ("rocketmq-client-python==2.0.0",),
        "rocketmq-python-cvs==2.1.0.3",
        cannot=(("send", "flying"), ("transaction", "flying")),
    )
    plain = Client(
        "cpp",
        "rocketmq 0.4.4 (C++)",
        ("rocketmq==0.4.4",),
        cannot=(("transaction", "threads"), ("transaction", "flying")),
    )
    return [transactional, plain]


def grpc_client() -> Client:
    return Client(
        "grpc",
        "rocketmq-python-client 5.1.2 (gRPC), both on Apache 5.5.0",
        ("rocketmq-python-client==5.1.2",),
        cannot=(("transaction", "flying"),),
    )


def make_ready(clients: Sequence[Client]) -> None:
    for client in clients:
        try:
            client.python()
        except Unavailable as error:
            client.lack = str(error)


def on_apache(ours: Client, grpc: Client, plan: Plan, directory: Path) -> None:
    server = Proxied(directory / "apache", {})
    try:
        server.start()
        warm = Plan(seconds=plan.java_warm_up_s, warm_up_s=0.0)
        create_topics(server.port)
        for load in (LOADS[1], LOADS[4]):  # a JVM is slow at first
            Client("ours").measure(load, server.namesrv_address, warm, directory)
            if not grpc.lack:
                grpc_client().measure(load, server.grpc_address, warm, directory)
        places = [(ours, server.namesrv_address), (grpc, server.grpc_address)]
        take_turns(places, server.port, plan, directory)
    except Unavailable as error:
        ours.lack = grpc.lack = str(error)
    finally:
        server.stop()


def create_topics(port: int) -> None:
    with Remoting(f"127.0.0.1:{port}") as client:
        for topic, attributes in TOPICS.values():
            client.create_topic(topic, attributes=attributes)


def take_turns(
    places: Sequence[tuple[Client, str]], port: int, plan: Plan, directory: Path
) -> None:
    create_topics(port)
    for _ in range(plan.rounds):
        for load in LOADS:
            for client, address in places:
                client.measure(load, address, plan, directory)


def table(ours: Client, theirs: Sequence[Client], ours_there: Client, grpc: Client) -> ResultTable:
    cells: list[Sequence[str]] = []
    for load in LOADS:
        pairs = [(ours, client, CPP_GOAL) for client in theirs]
        for mine, other, goals in (*pairs, (ours_there, grpc, GRPC_GOAL)):
            if mine.lack or (other.lack and mine is not ours):
                continue
            goal = goals.get(load.kind, "") if other.rate(load) else ""
            figures = mine.rate(load), other.rate(load)
            beside = [other.title, mine.cell(load), other.cell(load)]
            cells.append([load.what, *beside, ratio(*figures), goal])
    return ResultTable(cells, notes([ours, *theirs, ours_there, grpc]), COLUMNS)


def notes(clients: Sequence[Client]) -> list[str]:
    results = [
        "How many a second, and for how much processor time of the client each. 1 KiB bodies, one "
        "process. Threads wait for each answer. In flight: coroutines on uvloop "
        "(ours), callbacks (C++), futures (gRPC); a hyphen: the client has nothing for it.",
        "Processor time is that of the client's process alone. Broker and client share the "
        "machine's cores, so a rate is bounded by both.",
        "A transaction is a half, an empty local transaction and a commit. Ours waits until the "
        "broker has acknowledged the commit; the C++ client sends it one way.",
        "The gRPC client reaches the broker through Apache's proxy, one process more; ours speaks "
        "to the same broker directly. Our own broker has no gRPC door.",
    ]
    for client in clients:
        if client.lack:
            results.append(f"{client.title or 'Ours on Apache'} was not measured: {client.lack}")
        results += [f"Came to nothing: {reason}" for reason in sorted(client.reasons)]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 2 * cores:
        results.append(
            f"**Others used this machine meanwhile: load {load:.0f} on {cores} cores.** Figures "
            "and ratios change from run to run then; take them again when it is quiet."
        )
    return results
