"""Greedy clients beside an honest one: what does the broker's memory do, and the honest client?

    with Server(tmp_path) as server:
        report = watch(server, attack, target=Target.of(server))
    assert report.honest_failures == []
    assert report.grown_bytes <= LIMIT

An attack is a generator: it opens connections, takes a step and yields, and goes on with the next
step. When it returns or is closed, its connections must still be open until then, so that the
broker keeps what the attack made it keep. A server may close the connection of a greedy client at
any time, which is no error: `watch` ends the attack then.

The honest client works the whole time. Each round a newcomer connects, joins a group, locks a queue
and leaves; then a message is sent to a pull that waits for it. Memory is the anonymous resident
memory of the process, without the mapped pages of the log.
"""

from __future__ import annotations

import json
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop.records import decode_records
from tests.interop.remoting import Client
from tests.support.brokers import Server, next_response, start_pull
from tests.support.signing import SignedClient

MIB = 1 << 20
HONEST_TOPIC = "honest"
HONEST_GROUP = "honest-group"
WAIT_S = 60.0
_SAMPLE_INTERVAL_S = 0.01


@dataclass(frozen=True)
class Target:
    """The addresses of a server under attack, and the context of TLS clients if it has TLS."""

    address: str
    namesrv_address: str
    metrics_address: str = ""
    tls: ssl.SSLContext | None = None
    source_host: str = ""  # connections come from this address of loopback

    @classmethod
    def of(
        cls, server: Server, *, metrics_address: str = "", tls: ssl.SSLContext | None = None
    ) -> Target:
        return cls(server.address, server.namesrv_address, metrics_address, tls)

    def connect(self) -> Client:
        return self.connect_from(self.source_host)

    def connect_from(self, host: str) -> Client:
        """Connect from another address of loopback, which counts as another host."""
        return SignedClient(self.address, tls=self.tls, timeout_s=WAIT_S, source_host=host)

    def connect_namesrv(self) -> Client:
        return SignedClient(
            self.namesrv_address, tls=self.tls, timeout_s=WAIT_S, source_host=self.source_host
        )

    def connect_many(self, stack: ExitStack, count: int) -> list[Client]:
        """Open connections that stay open as long as the stack."""
        return [stack.enter_context(self.connect()) for _ in range(count)]


Attack = Callable[[Target], Generator[None]]


@dataclass
class GreedyReport:
    """What happened during an attack."""

    steps: int = 0  # that the attack took
    attack_ended_early: bool = False  # the server closed a connection of the attack
    before_bytes: int = 0  # of memory, before the attack
    peak_bytes: int = 0
    honest_rounds: int = 0
    honest_failures: list[str] = field(default_factory=list)
    honest_s: list[float] = field(default_factory=list)  # from each send to its delivery

    @property
    def grown_bytes(self) -> int:
        """How much more memory the broker had at its peak than before the attack."""
        return self.peak_bytes - self.before_bytes

    @property
    def p50_s(self) -> float:
        return statistics.median(self.honest_s)

    @property
    def p99_s(self) -> float:
        return sorted(self.honest_s)[int(len(self.honest_s) * 0.99)]


def watch(
    server: Server,
    attack: Attack,
    *,
    target: Target | None = None,
    honest_rounds_after: int = 5,
) -> GreedyReport:
    """Run an attack to its end beside an honest client.

    The honest client begins before the attack, and takes some rounds more while the connections of
    the attack are still open.
    """
    target = target or Target.of(server)
    report = GreedyReport()
    prepare_honest(target)
    with honest_rounds(target, report):
        _wait_for_rounds(report, 1)
        report.before_bytes = report.peak_bytes = anonymous_memory(server.pid)
        with _memory_samples(server.pid, report):
            steps = attack(target)
            try:
                for _ in steps:
                    report.steps += 1
            except (ConnectionError, ssl.SSLError):
                report.attack_ended_early = True
            _wait_for_rounds(report, report.honest_rounds + honest_rounds_after)
            steps.close()
    return report


def watch_honest(server: Server, seconds: float, *, target: Target | None = None) -> GreedyReport:
    """Run the honest client for a while. An attack may run in another process, or none."""
    report = GreedyReport()
    target = target or Target.of(server)
    prepare_honest(target)
    report.before_bytes = report.peak_bytes = anonymous_memory(server.pid)
    with honest_rounds(target, report), _memory_samples(server.pid, report):
        threading.Event().wait(seconds)
    return report


def anonymous_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes, without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no RssAnon")


def prepare_honest(target: Target) -> None:
    with target.connect() as client:
        client.create_topic(HONEST_TOPIC, queues=1)
        client.create_group(HONEST_GROUP)


# --- the honest client ---------------------------------------------------------------------------


@contextmanager
def honest_rounds(target: Target, report: GreedyReport) -> Iterator[None]:
    """Run the honest client in a thread as long as the `with` block."""
    should_stop = threading.Event()
    thread = threading.Thread(target=_run_honest, args=(target, report, should_stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        should_stop.set()
        thread.join(WAIT_S)
        if thread.is_alive():
            report.honest_failures.append(f"the last round did not end within {WAIT_S:g} s")


def _run_honest(target: Target, report: GreedyReport, should_stop: threading.Event) -> None:
    try:
        with target.connect() as sender, target.connect() as receiver:
            while not should_stop.is_set():
                with target.connect() as newcomer:
                    report.honest_failures += _join_and_leave(newcomer, report.honest_rounds)
                report.honest_failures += _deliver(sender, receiver, report)
                report.honest_rounds += 1
    except Exception as error:  # reported to the test, which runs in another thread
        report.honest_failures.append(f"{type(error).__name__}: {error}")
        report.honest_rounds = 1 << 30  # do not let the test wait for more


def _join_and_leave(newcomer: Client, number: int) -> Iterator[str]:
    client_id = f"honest-{number}"
    response = newcomer.request(
        34, body=heartbeat_body(client_id, [HONEST_GROUP], producer_groups=["honest-producers"])
    )
    if response.code != 0:
        yield f"heartbeat: {response.code} {response.remark}"
    members = newcomer.request(38, {"consumerGroup": HONEST_GROUP})
    if members.code != 0 or client_id not in json.loads(members.body)["consumerIdList"]:
        yield f"not a member: {members.code} {members.remark} {members.body[:100]!r}"
    lock = lock_body(HONEST_GROUP, client_id, [(HONEST_TOPIC, 0)])
    response = newcomer.request(41, body=lock)
    if response.code != 0 or not json.loads(response.body)["lockOKMQSet"]:
        yield f"lock: {response.code} {response.remark} {response.body[:100]!r}"
    newcomer.request(42, body=lock)


def _deliver(sender: Client, receiver: Client, report: GreedyReport) -> Iterator[str]:
    offset = sender.max_offset(HONEST_TOPIC, 0)
    start_pull(receiver, HONEST_TOPIC, offset, group=HONEST_GROUP)
    sent_s = time.perf_counter()
    sender.send(HONEST_TOPIC, b"%d" % offset)
    delivered = next_response(receiver)
    report.honest_s.append(time.perf_counter() - sent_s)
    bodies = [record.body for record in decode_records(delivered.body)] if delivered.body else []
    if bodies != [b"%d" % offset]:
        yield f"held pull: {delivered.code} {delivered.remark} {bodies}"


def _wait_for_rounds(report: GreedyReport, count: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while report.honest_rounds < count:
        if time.monotonic() > deadline_s:
            report.honest_failures.append(f"no round within {WAIT_S:g} s")
            return
        threading.Event().wait(_SAMPLE_INTERVAL_S)


@contextmanager
def _memory_samples(pid: int, report: GreedyReport) -> Iterator[None]:
    """Sample the memory of a process in a thread as long as the `with` block."""
    should_stop = threading.Event()

    def sample() -> None:
        while not should_stop.wait(_SAMPLE_INTERVAL_S):
            report.peak_bytes = max(report.peak_bytes, anonymous_memory(pid))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        should_stop.set()
        thread.join(WAIT_S)


# --- bodies and fields of requests ---------------------------------------------------------------


def heartbeat_body(
    client_id: str,
    consumer_groups: Sequence[str] = (),
    *,
    producer_groups: Sequence[str] = (),
    subscriptions: Sequence[Mapping[str, object]] = ({"topic": HONEST_TOPIC, "subString": "*"},),
) -> bytes:
    """Return the body of a HEART_BEAT; every consumer group gets the same subscriptions."""
    consumers = [
        {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": list(subscriptions),
        }
        for group in consumer_groups
    ]
    producers = [{"groupName": group} for group in producer_groups]
    body = {"clientID": client_id, "producerDataSet": producers, "consumerDataSet": consumers}
    return json.dumps(body).encode()


def lock_body(group: str, client_id: str, queues: Sequence[tuple[str, int]]) -> bytes:
    """Return the body of a LOCK_BATCH_MQ."""
    names = [{"topic": topic, "brokerName": "b", "queueId": number} for topic, number in queues]
    return json.dumps({"consumerGroup": group, "clientId": client_id, "mqSet": names}).encode()


def pull_fields(
    topic: str, queue_offset: int, *, group: str = "greedy", wait_ms: int = 0, **changes: object
) -> dict[str, object]:
    """Return the fields of a PULL_MESSAGE that has its subscription; held if it may wait."""
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": 0,
        "queueOffset": queue_offset,
        "maxMsgNums": 32,
        "sysFlag": 6 if wait_ms else 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": wait_ms,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
        **changes,
    }
