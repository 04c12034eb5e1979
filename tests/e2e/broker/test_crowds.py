"""Many at once: a thousand lines, a hundred groups on one topic, thousands of topics; and consumers
that go on after `kill -9`.

Nothing here is measured. A broker that is held up by somebody shows as an answer that does not
come within WAIT_S.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.interop.records import Record, decode_records
from tests.interop.remoting import Client, Response
from tests.support.brokers import WAIT_S, Served, begin_pull, next_answer

pytestmark = pytest.mark.slow

LINES = 1000
GROUPS = 100
QUEUES = 4
PIPELINED = 500  # more answers than that nobody leaves unread
LONG_PULLS = 60  # of 250 KiB each: more than all buffers together hold


@contextlib.contextmanager
def open_files(soft: int) -> Iterator[None]:
    """This process, and what it starts, may have so many; or as many as the system allows."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def begin_send(client: Client, topic: str, body: bytes, *, queue_id: int = 0) -> None:
    """Send and do not wait; `next_answer` does that."""
    fields = {"a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "i": ""}
    client.send_request(310, {**fields, "f": 0, "g": 0, "h": 0, "j": 0}, body, flag=0)


def begin_create(client: Client, topic: str) -> None:
    fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": 1, "writeQueueNums": 1}
    client.send_request(17, {**fields, "perm": 6, "topicFilterType": "SINGLE_TAG"}, b"", flag=0)


def pull_fields(topic: str, queue_id: int, queue_offset: int, group: str) -> dict[str, object]:
    return {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "maxMsgNums": 32,
        "sysFlag": 6,
        "suspendTimeoutMillis": 200,
        "subscription": "*",
    }


def consumer_heartbeat(client: Client, group: str, topic: str) -> None:
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [{"topic": topic, "subString": "*", "subVersion": 1}],
    }
    body = {"clientID": f"of-{group}", "producerDataSet": [], "consumerDataSet": [consumer]}
    client.expect(34, body=json.dumps(body).encode())


def shut(client: Client) -> None:
    """Say goodbye and wait until the broker has taken note."""
    client.socket.shutdown(socket.SHUT_WR)
    while client.socket.recv(1 << 16):
        pass
    client.close()


# --- lines ---------------------------------------------------------------------------------------


class Crowd:
    """Lines that each send one message a round; nobody waits for another's answer."""

    def __init__(self, served: Served, stack: contextlib.ExitStack) -> None:
        self.lines = [stack.enter_context(served.client()) for _ in range(LINES)]
        self.sent: list[bytes] = []
        self._rounds = itertools.count()

    def send(self) -> None:
        name = next(self._rounds)
        for number, line in enumerate(self.lines):
            body = b"%d-%d" % (name, number)
            begin_send(line, "crowd", body, queue_id=number % QUEUES)
            self.sent.append(body)
        assert Counter(next_answer(line).code for line in self.lines) == {0: LINES}


def begin_deaf(client: Client) -> None:
    """It asks for a lot and reads nothing."""
    fields = {**pull_fields("long", 0, 0, "deaf"), "sysFlag": 4}
    for _ in range(LONG_PULLS):
        client.send_request(11, fields, b"", flag=0)


def refuse_one_more(served: Served) -> None:
    with served.client() as extra, pytest.raises(ConnectionError):
        extra.max_offset("crowd", 0)


def test_a_thousand_lines_and_not_one_more(tmp_path: Path) -> None:
    """One of them is deaf and one stops in the middle of a frame; nobody else notices."""
    conf = {"escrowConnectionsMax": LINES + 3}
    with contextlib.ExitStack() as stack:
        with open_files(256):  # it has to help itself
            served = stack.enter_context(Served(tmp_path, conf=conf))
        stack.enter_context(open_files(LINES + 500))
        asking, deaf, silent = (stack.enter_context(served.client()) for _ in range(3))
        asking.create_topic("crowd", queues=QUEUES)
        for _ in range(4):
            asking.send("long", b"x" * 65_000)
        begin_deaf(deaf)
        asking.max_offset("crowd", 0)
        frame, middle = asking.sent_frame, len(asking.sent_frame) // 2
        silent.socket.sendall(frame[:middle])
        crowd = Crowd(served, stack)
        crowd.send()
        for _ in range(3):
            refuse_one_more(served)
        crowd.send()
        shut(crowd.lines.pop())
        crowd.lines.append(stack.enter_context(served.client()))  # there is room again
        crowd.send()
        found = [r.body for queue_id in range(QUEUES) for r in asking.pull_all("crowd", queue_id)]
        assert Counter(found) == Counter(crowd.sent)
        silent.socket.sendall(frame[middle:])
        assert next_answer(silent).code == 0
        assert Counter(next_answer(deaf).code for _ in range(LONG_PULLS)) == {0: LONG_PULLS}
    served.assert_clean()
    assert "Traceback" not in served.errors


# --- groups --------------------------------------------------------------------------------------


def wake_all(members: dict[str, Client], producer: Client, queue_offset: int) -> None:
    """Every group waits on every queue; one message each, and everybody has them all."""
    for group, client in members.items():
        for queue_id in range(QUEUES):
            begin_pull(client, "news", queue_offset, queue_id=queue_id, group=group)
    for queue_id in range(QUEUES):
        producer.send("news", b"%d-%d" % (queue_id, queue_offset), queue_id=queue_id)
    wanted = sorted(b"%d-%d" % (queue_id, queue_offset) for queue_id in range(QUEUES))
    for group, client in members.items():
        answers = [next_answer(client) for _ in range(QUEUES)]
        assert [answer.code for answer in answers] == [0] * QUEUES, group
        assert sorted(r.body for a in answers for r in decode_records(a.body)) == wanted, group


def test_a_hundred_groups_on_one_topic(tmp_path: Path) -> None:
    rounds = 3
    # By group and queue, so that no two neighbours have committed the same.
    committed = {
        (f"group-{number}", queue_id): (number + queue_id) % (rounds + 1)
        for number in range(GROUPS)
        for queue_id in range(QUEUES)
    }
    with Served(tmp_path) as served:
        with contextlib.ExitStack() as stack:
            producer = stack.enter_context(served.client())
            producer.create_topic("news", queues=QUEUES)
            members = {
                f"group-{number}": stack.enter_context(served.client()) for number in range(GROUPS)
            }
            for group, client in members.items():
                consumer_heartbeat(client, group, "news")
            for queue_offset in range(rounds):
                wake_all(members, producer, queue_offset)
            for (group, queue_id), queue_offset in committed.items():
                members[group].commit_offset(group, "news", queue_id, queue_offset)
        served.restart()
        with served.client() as client:
            found = {
                (group, queue_id): client.committed_offset(group, "news", queue_id)
                for group, queue_id in committed
            }
            assert found == committed
    served.assert_clean()
    assert "Traceback" not in served.errors


# --- consumers and kill -9 -----------------------------------------------------------------------


@dataclass
class Round:
    """From one start to the next kill."""

    served: Served
    over: threading.Event = field(default_factory=threading.Event)  # for senders
    all_sent: threading.Event = field(default_factory=threading.Event)
    progress: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class Sender:
    queue_id: int
    number: int = 0
    answered: list[bytes] = field(default_factory=list)

    def run(self, client: Client, now: Round) -> None:
        while not now.over.is_set():
            body = b"%d-%d" % (self.queue_id, self.number)
            self.number += 1
            client.send("orders", body, queue_id=self.queue_id)
            self.answered.append(body)


@dataclass
class Consumer:
    """One group's reader of one queue: it asks where the group was, reads on, and commits."""

    group: str
    queue_id: int
    read: dict[int, bytes] = field(default_factory=dict)  # by queue offset
    committed: int = 0
    starts: list[int] = field(default_factory=list)

    def run(self, client: Client, now: Round) -> None:
        consumer_heartbeat(client, self.group, "orders")
        at = client.committed_offset(self.group, "orders", self.queue_id) or 0
        self.starts.append(at)
        assert at <= len(self.read), "it would skip what this group has not read"
        while not now.all_sent.is_set() or at < client.max_offset("orders", self.queue_id):
            answer = client.request(11, pull_fields("orders", self.queue_id, at, self.group))
            self._take(answer, at)
            at = int(answer.ext_fields["nextBeginOffset"])
            client.commit_offset(self.group, "orders", self.queue_id, at)
            self.committed = at
            now.progress.release()

    def _take(self, answer: Response, at: int) -> None:
        records: list[Record] = decode_records(answer.body)
        assert [record.queue_offset for record in records] == list(range(at, at + len(records)))
        for record in records:
            assert self.read.setdefault(record.queue_offset, record.body) == record.body


def work(
    served: Served,
    senders: list[Sender],
    consumers: list[Consumer],
    end: Callable[[Round], None],
) -> list[Exception]:
    """Everybody on a thread and a line of his own until `end` has ended it: what went wrong."""
    now = Round(served)
    wrong: list[Exception] = []

    def run(worker: Sender | Consumer) -> None:
        try:
            with served.client() as client:
                worker.run(client, now)
        except Exception as error:
            wrong.append(error)

    workers = [*senders, *consumers]
    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    end(now)
    now.over.set()
    for thread in threads[: len(senders)]:
        thread.join(WAIT_S)
    now.all_sent.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return wrong


def kill_after(count: int) -> Callable[[Round], None]:
    def end(now: Round) -> None:
        for _ in range(count):
            assert now.progress.acquire(timeout=WAIT_S)
        now.served.kill()

    return end


def finish_after(count: int) -> Callable[[Round], None]:
    def end(now: Round) -> None:
        for _ in range(count):
            assert now.progress.acquire(timeout=WAIT_S)

    return end


def test_consumers_go_on_after_a_kill_and_skip_nothing(tmp_path: Path) -> None:
    senders = [Sender(queue_id) for queue_id in range(2)]
    consumers = [Consumer(group, sender.queue_id) for group in ("a", "b") for sender in senders]
    conf = {"flushDiskType": "SYNC_FLUSH", "flushConsumerOffsetInterval": 20}
    with Served(tmp_path, conf=conf) as served:
        with served.client() as client:
            client.create_topic("orders", queues=len(senders))
        for count in (100, 250, 400):
            wrong = work(served, senders, consumers, kill_after(count))
            assert [error for error in wrong if not isinstance(error, OSError)] == []
            assert wrong, "nobody noticed"
            served.start()
        assert work(served, senders, consumers, finish_after(100)) == []
        with served.client() as client:
            for sender in senders:
                stored = [record.body for record in client.pull_all("orders", sender.queue_id)]
                assert [body for body, count in Counter(stored).items() if count > 1] == []
                assert set(sender.answered) <= set(stored)
                for consumer in consumers:
                    if consumer.queue_id == sender.queue_id:
                        assert [consumer.read[at] for at in sorted(consumer.read)] == stored
        # Offsets were saved at least once before a kill, and each start found them.
        assert any(consumer.starts[-1] > 0 for consumer in consumers)
        served.restart()
        with served.client() as client:
            for each in consumers:
                found = client.committed_offset(each.group, "orders", each.queue_id)
                assert found == each.committed == len(each.read)
    served.assert_clean()


# --- topics --------------------------------------------------------------------------------------


def pipelined(
    client: Client, topics: list[str], begin: Callable[[Client, str], None]
) -> Iterator[Response]:
    for first in range(0, len(topics), PIPELINED):
        part = topics[first : first + PIPELINED]
        for topic in part:
            begin(client, topic)
        yield from (next_answer(client) for _ in part)


def begin_look(client: Client, topic: str) -> None:
    client.send_request(11, {**pull_fields(topic, 0, 0, "readers"), "sysFlag": 4}, b"", flag=0)


def bodies_of(client: Client, topics: list[str]) -> list[list[bytes]]:
    answers = pipelined(client, topics, begin_look)
    return [[record.body for record in decode_records(answer.body)] for answer in answers]


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_topics(tmp_path: Path, count: int) -> None:
    topics = [f"topic-{number}" for number in range(count)]
    with Served(tmp_path, wait_s=120) as served:  # each has a file that is flushed, in a directory
        with served.client() as client:
            client.create_group("readers")
            created = Counter(answer.code for answer in pipelined(client, topics, begin_create))
            assert created == {0: count}
            sends = pipelined(
                client, topics, lambda client, topic: begin_send(client, topic, topic.encode())
            )
            assert Counter(answer.code for answer in sends) == {0: count}
            assert bodies_of(client, topics) == [[topic.encode()] for topic in topics]
        served.restart()
        with served.client() as client, served.name_client() as names:
            assert bodies_of(client, topics) == [[topic.encode()] for topic in topics]
            route = names.route(topics[-1])
            assert route is not None
            assert [queues["writeQueueNums"] for queues in route["queueDatas"]] == [1]
    served.assert_clean()
    assert "Traceback" not in served.errors
