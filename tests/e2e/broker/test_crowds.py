"""Large numbers of connections, groups and topics; and consumers that continue after `kill -9`.

These tests measure nothing. If one client holds up the broker, a response to another client does
not arrive within WAIT_S, and the test fails.
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
from tests.support.brokers import WAIT_S, Server, next_response, start_pull

pytestmark = pytest.mark.slow

CONNECTIONS = 1000
GROUPS = 100
QUEUES = 4
PIPELINE_DEPTH = 500  # requests that are sent before the first response is read
LARGE_PULLS = 60  # responses of 250 KiB each: more than all buffers together hold


@contextlib.contextmanager
def open_files_limit(limit: int) -> Iterator[None]:
    """Set the limit of open files for this process and its children, up to the hard limit."""
    previous, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (previous, hard))


def send_without_waiting(client: Client, topic: str, body: bytes, *, queue_id: int = 0) -> None:
    """Send a message; `next_response` returns its response."""
    fields = {"a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "i": ""}
    client.send_request(310, {**fields, "f": 0, "g": 0, "h": 0, "j": 0}, body, flag=0)


def create_topic_without_waiting(client: Client, topic: str) -> None:
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
    body = {"clientID": f"client-{group}", "producerDataSet": [], "consumerDataSet": [consumer]}
    client.expect(34, body=json.dumps(body).encode())


def disconnect(client: Client) -> None:
    """Close the connection after the broker has closed its side."""
    client.socket.shutdown(socket.SHUT_WR)
    while client.socket.recv(1 << 16):
        pass
    client.close()


# --- connections ---------------------------------------------------------------------------------


class ProducerConnections:
    """Many connections; in each round every one sends a message before a response is read."""

    def __init__(self, server: Server, stack: contextlib.ExitStack) -> None:
        self.connections = [stack.enter_context(server.client()) for _ in range(CONNECTIONS)]
        self.sent: list[bytes] = []
        self._rounds = itertools.count()

    def send_round(self) -> None:
        round_number = next(self._rounds)
        for number, connection in enumerate(self.connections):
            body = b"%d-%d" % (round_number, number)
            send_without_waiting(connection, "orders", body, queue_id=number % QUEUES)
            self.sent.append(body)
        codes = Counter(next_response(connection).code for connection in self.connections)
        assert codes == {0: CONNECTIONS}


def request_large_pulls(client: Client) -> None:
    """Request more data than buffers can hold; the caller does not read the responses yet."""
    fields = {**pull_fields("long", 0, 0, "readers"), "sysFlag": 4}
    for _ in range(LARGE_PULLS):
        client.send_request(11, fields, b"", flag=0)


def assert_next_connection_is_refused(server: Server) -> None:
    with server.client() as extra, pytest.raises(ConnectionError):
        extra.max_offset("orders", 0)


def test_a_thousand_connections_are_served_and_one_above_the_limit_is_refused(
    tmp_path: Path,
) -> None:
    """One client does not read its responses and one stops in the middle of a frame; the other
    connections are served all the same."""
    conf = {"escrowConnectionsMax": CONNECTIONS + 3}
    with contextlib.ExitStack() as stack:
        with open_files_limit(256):  # the broker has to raise its limit itself
            server = stack.enter_context(Server(tmp_path, conf=conf))
        stack.enter_context(open_files_limit(CONNECTIONS + 500))
        client, not_reading, incomplete = (stack.enter_context(server.client()) for _ in range(3))
        client.create_topic("orders", queues=QUEUES)
        for _ in range(4):
            client.send("long", b"x" * 65_000)
        request_large_pulls(not_reading)
        client.max_offset("orders", 0)
        frame, middle = client.sent_frame, len(client.sent_frame) // 2
        # It is known as a client: one that has never sent a request would be closed for a new one.
        incomplete.max_offset("orders", 0)
        incomplete.socket.sendall(frame[:middle])

        producers = ProducerConnections(server, stack)
        producers.send_round()
        for _ in range(3):
            assert_next_connection_is_refused(server)
        producers.send_round()
        disconnect(producers.connections.pop())
        producers.connections.append(stack.enter_context(server.client()))
        producers.send_round()

        bodies = [
            record.body
            for queue_id in range(QUEUES)
            for record in client.pull_all("orders", queue_id)
        ]
        assert Counter(bodies) == Counter(producers.sent)
        incomplete.socket.sendall(frame[middle:])
        assert next_response(incomplete).code == 0
        codes = Counter(next_response(not_reading).code for _ in range(LARGE_PULLS))
        assert codes == {0: LARGE_PULLS}
    server.assert_clean()
    assert "Traceback" not in server.errors


# --- groups --------------------------------------------------------------------------------------


def wake_all(members: dict[str, Client], producer: Client, queue_offset: int) -> None:
    """Let every group wait at every queue, send a message to each queue, and check that every
    group receives all of them."""
    for group, client in members.items():
        for queue_id in range(QUEUES):
            start_pull(client, "news", queue_offset, queue_id=queue_id, group=group)
    for queue_id in range(QUEUES):
        producer.send("news", b"%d-%d" % (queue_id, queue_offset), queue_id=queue_id)
    expected = sorted(b"%d-%d" % (queue_id, queue_offset) for queue_id in range(QUEUES))
    for group, client in members.items():
        responses = [next_response(client) for _ in range(QUEUES)]
        assert [response.code for response in responses] == [0] * QUEUES, group
        records = [record for response in responses for record in decode_records(response.body)]
        assert sorted(record.body for record in records) == expected, group


def test_a_hundred_groups_on_one_topic_get_all_messages_and_keep_their_offsets(
    tmp_path: Path,
) -> None:
    rounds = 3
    # The offset depends on group and queue, so that a mix-up of neighbours shows.
    committed = {
        (f"group-{number}", queue_id): (number + queue_id) % (rounds + 1)
        for number in range(GROUPS)
        for queue_id in range(QUEUES)
    }
    with Server(tmp_path) as server:
        with contextlib.ExitStack() as stack:
            producer = stack.enter_context(server.client())
            producer.create_topic("news", queues=QUEUES)
            members = {
                f"group-{number}": stack.enter_context(server.client()) for number in range(GROUPS)
            }
            for group, client in members.items():
                consumer_heartbeat(client, group, "news")
            for queue_offset in range(rounds):
                wake_all(members, producer, queue_offset)
            for (group, queue_id), queue_offset in committed.items():
                members[group].commit_offset(group, "news", queue_id, queue_offset)
        server.restart()
        with server.client() as client:
            offsets = {
                (group, queue_id): client.committed_offset(group, "news", queue_id)
                for group, queue_id in committed
            }
            assert offsets == committed
    server.assert_clean()
    assert "Traceback" not in server.errors


# --- consumers and kill -9 -----------------------------------------------------------------------


@dataclass
class Round:
    """The time from a start of the broker to its next kill, as events for the worker threads."""

    server: Server
    senders_should_stop: threading.Event = field(default_factory=threading.Event)
    all_sent: threading.Event = field(default_factory=threading.Event)
    commits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class Sender:
    queue_id: int
    number: int = 0
    acknowledged: list[bytes] = field(default_factory=list)

    def run(self, client: Client, current: Round) -> None:
        while not current.senders_should_stop.is_set():
            body = b"%d-%d" % (self.queue_id, self.number)
            self.number += 1
            client.send("orders", body, queue_id=self.queue_id)
            self.acknowledged.append(body)


@dataclass
class Consumer:
    """Consume one queue for one group: start at the committed offset, pull, and commit."""

    group: str
    queue_id: int
    bodies: dict[int, bytes] = field(default_factory=dict)  # by queue offset
    committed: int = 0
    start_offsets: list[int] = field(default_factory=list)  # one for each round

    def run(self, client: Client, current: Round) -> None:
        consumer_heartbeat(client, self.group, "orders")
        offset = client.committed_offset(self.group, "orders", self.queue_id) or 0
        self.start_offsets.append(offset)
        assert offset <= len(self.bodies), "the committed offset skips messages"
        while not current.all_sent.is_set() or offset < client.max_offset("orders", self.queue_id):
            response = client.request(11, pull_fields("orders", self.queue_id, offset, self.group))
            self._add(decode_records(response.body), offset)
            offset = int(response.ext_fields["nextBeginOffset"])
            client.commit_offset(self.group, "orders", self.queue_id, offset)
            self.committed = offset
            current.commits.release()

    def _add(self, records: list[Record], offset: int) -> None:
        offsets = [record.queue_offset for record in records]
        assert offsets == list(range(offset, offset + len(records)))
        for record in records:
            # A message that is delivered again must be the same message.
            assert self.bodies.setdefault(record.queue_offset, record.body) == record.body


def run_round(
    server: Server,
    senders: list[Sender],
    consumers: list[Consumer],
    end_round: Callable[[Round], None],
) -> list[Exception]:
    """Run each worker in a thread with a connection of its own until `end_round` returns.

    Returns the exceptions of the workers.
    """
    current = Round(server)
    errors: list[Exception] = []

    def run(worker: Sender | Consumer) -> None:
        try:
            with server.client() as client:
                worker.run(client, current)
        except Exception as error:
            errors.append(error)

    workers = [*senders, *consumers]
    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    end_round(current)
    current.senders_should_stop.set()
    for thread in threads[: len(senders)]:
        thread.join(WAIT_S)
    current.all_sent.set()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return errors


def finish_after(commits: int) -> Callable[[Round], None]:
    """Return a function that waits until the consumers have committed so many times."""

    def end_round(current: Round) -> None:
        for _ in range(commits):
            assert current.commits.acquire(timeout=WAIT_S)

    return end_round


def kill_after(commits: int) -> Callable[[Round], None]:
    """Like `finish_after`, and then kill the broker."""
    wait = finish_after(commits)

    def end_round(current: Round) -> None:
        wait(current)
        current.server.kill()

    return end_round


def test_consumers_continue_after_a_kill_and_skip_no_message(tmp_path: Path) -> None:
    senders = [Sender(queue_id) for queue_id in range(2)]
    consumers = [Consumer(group, sender.queue_id) for group in ("a", "b") for sender in senders]
    conf = {"flushDiskType": "SYNC_FLUSH", "flushConsumerOffsetInterval": 20}
    with Server(tmp_path, conf=conf) as server:
        with server.client() as client:
            client.create_topic("orders", queues=len(senders))
        for commits in (100, 250, 400):
            errors = run_round(server, senders, consumers, kill_after(commits))
            assert [error for error in errors if not isinstance(error, OSError)] == []
            assert errors, "no worker noticed the kill"
            server.start()
        assert run_round(server, senders, consumers, finish_after(100)) == []
        with server.client() as client:
            for sender in senders:
                stored = [record.body for record in client.pull_all("orders", sender.queue_id)]
                assert [body for body, count in Counter(stored).items() if count > 1] == []
                assert set(sender.acknowledged) <= set(stored)
                for consumer in consumers:
                    if consumer.queue_id == sender.queue_id:
                        assert [body for _, body in sorted(consumer.bodies.items())] == stored
        # Offsets were saved at least once before a kill and read at the next start.
        assert any(consumer.start_offsets[-1] > 0 for consumer in consumers)
        server.restart()
        with server.client() as client:
            for consumer in consumers:
                offset = client.committed_offset(consumer.group, "orders", consumer.queue_id)
                assert offset == consumer.committed == len(consumer.bodies)
    server.assert_clean()


# --- topics --------------------------------------------------------------------------------------


def pipelined(
    client: Client, topics: list[str], send_request: Callable[[Client, str], None]
) -> Iterator[Response]:
    """Send a request for each topic, PIPELINE_DEPTH at a time, and yield the responses."""
    for first in range(0, len(topics), PIPELINE_DEPTH):
        part = topics[first : first + PIPELINE_DEPTH]
        for topic in part:
            send_request(client, topic)
        yield from (next_response(client) for _ in part)


def send_name_as_body(client: Client, topic: str) -> None:
    send_without_waiting(client, topic, topic.encode())


def pull_without_waiting(client: Client, topic: str) -> None:
    client.send_request(11, {**pull_fields(topic, 0, 0, "readers"), "sysFlag": 4}, b"", flag=0)


def bodies_by_topic(client: Client, topics: list[str]) -> list[list[bytes]]:
    responses = pipelined(client, topics, pull_without_waiting)
    return [[record.body for record in decode_records(response.body)] for response in responses]


@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_thousands_of_topics_are_created_served_and_survive_a_restart(
    tmp_path: Path, count: int
) -> None:
    topics = [f"topic-{number}" for number in range(count)]
    expected = [[topic.encode()] for topic in topics]
    # A stop takes long: each topic has a directory and a file that is flushed.
    with Server(tmp_path, wait_s=120) as server:
        with server.client() as client:
            client.create_group("readers")
            responses = pipelined(client, topics, create_topic_without_waiting)
            assert Counter(response.code for response in responses) == {0: count}
            responses = pipelined(client, topics, send_name_as_body)
            assert Counter(response.code for response in responses) == {0: count}
            assert bodies_by_topic(client, topics) == expected
        server.restart()
        with server.client() as client, server.namesrv_client() as name_server:
            assert bodies_by_topic(client, topics) == expected
            route = name_server.route(topics[-1])
            assert route is not None
            assert [queues["writeQueueNums"] for queues in route["queueDatas"]] == [1]
    server.assert_clean()
    assert "Traceback" not in server.errors
