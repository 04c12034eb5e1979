"""Latency of a client while another one misbehaves, relative to a quiet broker.

The misbehaving client is a separate process; the measured one sends and waits.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

from bench.broker import ResultTable
from bench.measure import Plan
from bench.others import Latency, latency_of_others
from bench.scale import _fields, allow_files
from bench.servers import EscrowMQ, client
from tests.interop.remoting import Client

COLUMNS = ("meanwhile", "others, p50 / p99", "p50 to quiet", "p99 to quiet")
READY_S = 60.0
MIB = 1 << 20
IDLE = 5_000

Misbehaviour = Callable[[str], Iterator[None]]  # each step ends with a yield


def idle_crowd(address: str) -> Iterator[None]:
    host, _, port = address.partition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        while True:
            yield


def half_frames(address: str) -> Iterator[None]:
    """Open a hundred connections and send the beginning of a long request on each, byte by byte."""
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(Client(address, timeout_s=60)) for _ in range(100)]
        begin = (4 * MIB).to_bytes(4, "big") + (100).to_bytes(4, "big") + b" " * 100_000
        for line in lines:
            line.socket.sendall(begin)
        for line in itertools.cycle(lines):
            line.socket.sendall(b" ")
            yield


def deaf(address: str) -> Iterator[None]:
    """Request far more than it reads."""
    fields = {
        "consumerGroup": "deaf",
        "topic": "long",
        "queueId": 0,
        "queueOffset": 0,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    }
    with Client(address, timeout_s=0.5) as line:
        for _ in range(8):
            line.send("long", b"x" * 65_000)
        while True:
            with contextlib.suppress(TimeoutError):
                line.send_request(11, fields, b"", flag=0)
            yield


def never_acknowledging(address: str) -> Iterator[None]:
    """Pull the same messages again and again."""
    with Client(address, timeout_s=60) as line:
        for _ in range(32):
            line.send("unread", b"x" * 1000)
        while True:
            line.pull("unread", 0, 0, group="never")
            yield


def poison(address: str) -> Iterator[None]:
    """Send properties that are too long, again and again."""
    with Client(address, timeout_s=60) as line:
        while True:
            line.request(310, {**_fields("poison"), "i": "a\x01" + "x" * 60_000 + "\x02"}, b"x")
            yield


def greedy(address: str) -> Iterator[None]:
    """Keep sixty-four sends in flight."""
    with Client(address, timeout_s=60) as line:
        for _ in range(64):
            line.send_request(310, _fields("greedy"), b"x" * 1000, flag=0)
        while True:
            line.next_frame()
            line.send_request(310, _fields("greedy"), b"x" * 1000, flag=0)
            yield


CASES: Sequence[tuple[str, Misbehaviour, Mapping[str, object]]] = (
    (f"{IDLE:,} idle connections", idle_crowd, {}),
    ("100 half frames, byte by byte", half_frames, {}),
    ("one that reads no answers", deaf, {}),
    ("a consumer that never acknowledges", never_acknowledging, {}),
    ("poison: properties too long", poison, {}),
    ("a greedy sender", greedy, {}),
    ("the same, held to 1,000 a second", greedy, {"escrowConnectionSendsMax": 1000}),
)


def rows(plan: Plan) -> ResultTable:
    allow_files()
    report: list[Sequence[str]] = []
    for what, misbehave, settings in CASES:
        quiet, loud = measured(misbehave, settings, plan)
        report.append(
            (
                what,
                f"{loud} (quiet: {quiet})",
                f"{loud.p50_ms / quiet.p50_ms:.2f}",
                f"{loud.p99_ms / quiet.p99_ms:.2f}",
            )
        )
    notes = [
        "One client sends 200 bytes and waits, before and while the other misbehaves at full "
        "speed from a process of its own. On few cores the two processes also share those, so a "
        "ratio counts the machine as well as the broker.",
    ]
    return ResultTable(report, notes, COLUMNS)


def measured(
    misbehave: Misbehaviour, settings: Mapping[str, object], plan: Plan
) -> tuple[Latency, Latency]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="escrowmq-neighbours-") as name:
        server = EscrowMQ(Path(name), settings)
        server.start()
        try:
            with client(server) as admin:
                for topic in ("long", "unread", "greedy"):
                    admin.create_topic(topic, queues=1)
                admin.create_group("deaf")
                admin.create_group("never")
            limited = "escrowConnectionSendsMax" in settings
            quiet = _others(server, plan.seconds, limited)
            ready = spawn.Event()
            address = f"127.0.0.1:{server.port}"
            other = spawn.Process(target=_misbehave, args=(misbehave, address, ready), daemon=True)
            other.start()
            try:
                if not ready.wait(READY_S):
                    raise TimeoutError(f"{misbehave.__name__} does not begin")
                return quiet, _others(server, plan.seconds, limited)
            finally:
                other.kill()
                other.join()
        finally:
            server.stop()


def _others(server: EscrowMQ, seconds: float, limited: bool) -> Latency:
    """Measure with a rate limit that the well-behaved client stays below."""
    return latency_of_others(server, seconds, pause_s=0.002 if limited else 0.0)


def _misbehave(misbehave: Misbehaviour, address: str, ready: Event) -> None:
    allow_files()
    for step, _ in enumerate(misbehave(address)):
        if step == 10:
            ready.set()
        if misbehave is idle_crowd and step > 10:
            multiprocessing.Event().wait()  # does nothing: the quiet reference
