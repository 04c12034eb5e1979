"""A broker that flushes before it responds is killed under load, three times.

Several threads send, each to a queue of its own. After each kill, every acknowledged message is
stored once and in order; a message without a response is stored once or not at all. Topics, groups,
committed offsets and delayed messages survive too.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.interop.remoting import Client
from tests.support.brokers import WAIT_S, Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ROUNDS = 3
SENDERS = 4
OFFSETS_INTERVAL_MS = 300  # between two writes of the committed offsets


@dataclass
class Sender:
    """Send to one queue until the broker is killed. The next round continues the numbers."""

    queue_id: int
    acknowledged: list[bytes] = field(default_factory=list)
    number: int = 0
    committed: int = 0

    def run(self, client: Client, acknowledgements: threading.Semaphore) -> None:
        try:
            while True:
                body = b"%d-%d" % (self.queue_id, self.number)
                self.number += 1
                client.send("orders", body, {"KEYS": body.decode()}, queue_id=self.queue_id)
                self.acknowledged.append(body)
                acknowledgements.release()
        except OSError:
            pass  # the broker was killed
        finally:
            client.close()


def load_and_kill(server: Server, senders: list[Sender], *, after: int) -> None:
    acknowledgements = threading.Semaphore(0)
    threads = [
        threading.Thread(target=sender.run, args=(server.client(), acknowledgements))
        for sender in senders
    ]
    for thread in threads:
        thread.start()
    for _ in range(after):
        assert acknowledgements.acquire(timeout=WAIT_S)
    server.kill()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def check_queue(client: Client, sender: Sender) -> int:
    """Check the messages of a sender's queue, and return how many there are."""
    bodies = [record.body for record in client.pull_all("orders", sender.queue_id)]
    assert [body for body, count in Counter(bodies).items() if count > 1] == []
    assert set(sender.acknowledged) <= set(bodies)
    assert bodies == sorted(bodies, key=lambda body: int(body.partition(b"-")[2]))
    for body in sender.acknowledged[-3:]:
        assert [record.body for record in client.query_by_key("orders", body.decode())] == [body]
    return len(bodies)


@pytest.mark.both_paths
def test_acknowledged_messages_survive_a_kill_without_duplicates(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"SEED={seed}")  # noqa: T201 - shown if the test fails
    senders = [Sender(queue_id) for queue_id in range(SENDERS)]
    conf = {"flushDiskType": "SYNC_FLUSH", "flushConsumerOffsetInterval": OFFSETS_INTERVAL_MS}
    with Server(tmp_path, conf=conf) as server:
        with server.client() as client:
            client.create_topic("orders", queues=SENDERS)
            client.create_group("readers")
        server.restart()  # saves the topic and the group
        for _ in range(ROUNDS):
            load_and_kill(server, senders, after=rng.randint(20, 300))
            server.start()
            with server.client() as client:
                for sender in senders:
                    offset = client.committed_offset("readers", "orders", sender.queue_id)
                    assert (offset or 0) == sender.committed
                    sender.committed = check_queue(client, sender)
                    client.commit_offset("readers", "orders", sender.queue_id, sender.committed)
            wait_until(
                partial(offsets_are_saved, server, senders), "the committed offsets are saved"
            )
    server.assert_clean()
    with Server(tmp_path) as server, server.client() as client:
        assert [check_queue(client, sender) for sender in senders] == [
            sender.committed for sender in senders
        ]


def offsets_are_saved(server: Server, senders: list[Sender]) -> bool:
    path = server.data / "config" / "consumerOffset.json"
    text = path.read_text() if path.exists() else ""
    return all(f'"{sender.queue_id}": {sender.committed}' in text for sender in senders)


def test_delay_offsets_are_saved_at_their_own_interval(tmp_path: Path) -> None:
    conf = {
        "flushDelayOffsetInterval": 20,
        "flushIntervalCommitLog": 20,
        "flushConsumerOffsetInterval": 3_600_000,
    }
    with Server(tmp_path, conf=conf) as server:
        with server.client() as client:
            client.create_topic("orders")
            client.send("orders", b"late", {"TIMER_DELAY_MS": "10"})
            path = server.data / "config" / "delayOffset.json"
            wait_until(path.exists, "the delay offsets are saved")
            wait_until(lambda: client.max_offset("orders", 0) == 1, "the message is delivered")
            assert [record.body for record in client.pull_all("orders", 0)] == [b"late"]
        server.kill()
        assert path.exists()


def test_a_topic_created_by_an_acknowledged_message_survives_a_kill(tmp_path: Path) -> None:
    """The message survives; without its topic no consumer could read it."""
    with Server(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}) as server:
        with server.client() as client:
            client.send("new-topic", b"1")
        server.kill()
        server.start()
        with server.client() as client:
            assert [record.body for record in client.pull_all("new-topic", 0)] == [b"1"]
    server.assert_clean()


def test_a_created_topic_and_group_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        with server.client() as client:
            client.create_topic("orders", queues=2)
            client.expect(200, body=b'{"groupName":"off","consumeEnable":false}')
        server.kill()
        server.start()
        with server.client() as client:
            assert client.pull("orders", 1, 0, group="off").code == 16
            assert client.pull("orders", 1, 0).code == 19


def test_a_delayed_message_survives_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}) as server:
        with server.client() as client:
            client.create_topic("orders")
            client.send("orders", b"level", {"DELAY": "1"}, queue_id=0)
            client.send("orders", b"timer", {"TIMER_DELAY_MS": "900"}, queue_id=1)
        server.restart()  # saves the topic
        server.kill()
        server.start()
        with server.client() as client:
            for queue_id, body in ((0, b"level"), (1, b"timer")):
                client.expect(
                    11,
                    {
                        "consumerGroup": "g",
                        "topic": "orders",
                        "queueId": queue_id,
                        "queueOffset": 0,
                        "maxMsgNums": 1,
                        "sysFlag": 6,
                        "suspendTimeoutMillis": 10_000,
                        "subscription": "*",
                    },
                )
                records = client.pull_all("orders", queue_id)
                assert [record.body for record in records] == [body]
    server.assert_clean()
