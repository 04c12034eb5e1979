"""A broker that flushes before it answers is killed under load, three times over.

Some threads send, each to a queue of its own, and commit how far a group has read. Whatever was
answered is there afterwards, once and in order; what was not answered is there once or not at all.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.interop.remoting import Client
from tests.support.brokers import WAIT_S, Server

pytestmark = pytest.mark.slow

ROUNDS = 3
SENDERS = 4
QUIET_MS = 300  # between two writes of the offsets


@dataclass
class Sender:
    """One thread, one line, one queue; it goes on where the last round was cut off."""

    queue_id: int
    answered: list[bytes] = field(default_factory=list)
    number: int = 0
    committed: int = 0

    def run(self, client: Client, count_down: threading.Semaphore) -> None:
        try:
            while True:
                body = b"%d-%d" % (self.queue_id, self.number)
                self.number += 1
                client.send("orders", body, {"KEYS": body.decode()}, queue_id=self.queue_id)
                self.answered.append(body)
                count_down.release()
        except OSError:
            pass  # killed
        finally:
            client.close()


def load_and_kill(served: Server, senders: list[Sender], *, after: int) -> None:
    count_down = threading.Semaphore(0)
    threads = [
        threading.Thread(target=sender.run, args=(served.client(), count_down))
        for sender in senders
    ]
    for thread in threads:
        thread.start()
    for _ in range(after):
        assert count_down.acquire(timeout=WAIT_S)
    served.kill()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def look(client: Client, sender: Sender) -> int:
    """How many messages the queue has."""
    found = [record.body for record in client.pull_all("orders", sender.queue_id)]
    assert [body for body, count in Counter(found).items() if count > 1] == []
    assert set(sender.answered) <= set(found)
    assert found == sorted(found, key=lambda body: int(body.partition(b"-")[2]))
    for body in sender.answered[-3:]:
        assert [each.body for each in client.query_by_key("orders", body.decode())] == [body]
    return len(found)


def test_what_was_answered_survives_a_kill_once(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"SEED={seed}")  # noqa: T201 - shown if the test fails
    senders = [Sender(queue_id) for queue_id in range(SENDERS)]
    conf = {"flushDiskType": "SYNC_FLUSH", "flushConsumerOffsetInterval": QUIET_MS}
    with Server(tmp_path, conf=conf) as served:
        with served.client() as client:
            client.create_topic("orders", queues=SENDERS)
            client.create_group("readers")
        served.restart()  # so that topic and group are there, whenever they are saved
        for _ in range(ROUNDS):
            load_and_kill(served, senders, after=rng.randint(20, 300))
            served.start()
            with served.client() as client:
                for sender in senders:
                    before = client.committed_offset("readers", "orders", sender.queue_id)
                    assert (before or 0) == sender.committed
                    sender.committed = look(client, sender)
                    client.commit_offset("readers", "orders", sender.queue_id, sender.committed)
                assert offsets_are_saved(served, client, senders)
    served.assert_clean()
    with Server(tmp_path) as served, served.client() as client:
        assert [look(client, sender) for sender in senders] == [
            sender.committed for sender in senders
        ]


def offsets_are_saved(served: Server, client: Client, senders: list[Sender]) -> bool:
    """Ask until the file holds them; a held pull that ends is the clock."""
    wanted = {f'"{sender.queue_id}": {sender.committed}' for sender in senders}
    path = served.data / "config" / "consumerOffset.json"
    for _ in range(50):
        text = path.read_text() if path.exists() else ""
        if all(each in text for each in wanted):
            return True
        wait_a_bit(client, "orders", senders[0].committed)
    return False


def wait_a_bit(client: Client, topic: str, queue_offset: int) -> None:
    """As long as a pull is held that finds nothing."""
    fields = {"consumerGroup": "readers", "topic": topic, "queueId": 0, "maxMsgNums": 1}
    held = {"sysFlag": 6, "suspendTimeoutMillis": 100, "subscription": "*"}
    client.request(11, {**fields, **held, "queueOffset": queue_offset})


def test_how_far_delays_are_is_saved_at_its_own_pace(tmp_path: Path) -> None:
    conf = {
        "flushDelayOffsetInterval": 20,
        "flushIntervalCommitLog": 20,
        "flushConsumerOffsetInterval": 3_600_000,
    }
    with Server(tmp_path, conf=conf) as served:
        with served.client() as client:
            client.create_topic("orders")
            client.send("orders", b"late", {"TIMER_DELAY_MS": "10"})
            for _ in range(50):  # a held pull that ends is the clock
                if (served.data / "config" / "delayOffset.json").exists():
                    break
                wait_a_bit(client, "orders", client.max_offset("orders", 0))
            assert [record.body for record in client.pull_all("orders", 0)] == [b"late"]
        served.kill()
        assert (served.data / "config" / "delayOffset.json").exists()


def test_a_topic_made_by_an_answered_message_survives_a_kill(tmp_path: Path) -> None:
    """Its message does; without the topic nobody could read it."""
    with Server(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}) as served:
        with served.client() as client:
            client.send("made-just-now", b"1")
        served.kill()
        served.start()
        with served.client() as client:
            assert [record.body for record in client.pull_all("made-just-now", 0)] == [b"1"]
    served.assert_clean()


def test_a_created_topic_and_group_survive_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path) as served:
        with served.client() as client:
            client.create_topic("orders", queues=2)
            client.expect(200, body=b'{"groupName":"off","consumeEnable":false}')
        served.kill()
        served.start()
        with served.client() as client:
            assert client.pull("orders", 1, 0, group="off").code == 16
            assert client.pull("orders", 1, 0).code == 19


def test_a_delayed_message_survives_a_kill(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}) as served:
        with served.client() as client:
            client.create_topic("orders")
            client.send("orders", b"level", {"DELAY": "1"}, queue_id=0)
            client.send("orders", b"timer", {"TIMER_DELAY_MS": "900"}, queue_id=1)
        served.restart()  # topics are saved
        served.kill()
        served.start()
        with served.client() as client:
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
                assert [each.body for each in client.pull_all("orders", queue_id)] == [body]
    served.assert_clean()
