"""What a client sends over the network does not decide transactions at the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.remoting import COMMIT, Client, SendResult
from tests.support.acl_broker import ADMIN, broker_with_acl
from tests.support.brokers import Server
from tests.support.signing import SignedClient

pytestmark = pytest.mark.slow

HALF_TOPIC, OP_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CURSOR_GROUP = "CID_RMQ_SYS_TRANS"
NO_CHECKS: dict[str, object] = {
    "transactionTimeOut": 600_000,
    "transactionCheckInterval": 600_000,
}
HALVES = 20


def park_all(client: Client) -> list[SendResult]:
    client.create_topic("orders", queues=1)
    return [
        client.send_half("orders", b"real %d" % number, {"UNIQ_KEY": f"k{number}"}, group="banks")
        for number in range(HALVES)
    ]


def attack(client: Client, halves: list[SendResult]) -> None:
    """Send everything that has moved the cursor or forged a final."""
    for number, half in enumerate(halves):
        properties = f"UNIQ_KEY\x01k{number}\x02PGROUP\x01banks\x02"
        for sys_flag in (8, 0):
            fields = {"a": "banks", "b": "orders", "c": "TBW102", "d": 1, "e": 0, "f": sys_flag}
            fields |= {"g": 0, "h": 0, "i": properties, "j": 0, "k": False, "m": False}
            client.request(310, fields, b"forged")
        client.request(36, {"offset": half.log_offset, "group": CURSOR_GROUP, "delayLevel": 1})
    for topic in (HALF_TOPIC, OP_TOPIC):
        offset = {"consumerGroup": CURSOR_GROUP, "topic": topic, "queueId": 0}
        client.request(15, {**offset, "commitOffset": HALVES})
        pull = {**offset, "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 5, "subVersion": 0}
        client.request(
            11,
            {**pull, "commitOffset": HALVES, "suspendTimeoutMillis": 0, "subscription": "*"},
        )
        reset = {"topic": topic, "group": CURSOR_GROUP, "timestamp": -1, "isForce": True}
        client.request(222, reset)
        client.request(314, {"srcGroup": "readers", "destGroup": CURSOR_GROUP, "topic": topic})
        client.request(215, {"topic": topic})
    client.request(207, {"groupName": CURSOR_GROUP, "cleanOffset": True})


def assert_all_open(client: Client, halves: list[SendResult]) -> None:
    for half in halves:
        response = client.end_transaction(half, COMMIT, topic="orders", group="banks")
        assert (response.code, response.ext_fields.get("state")) == (0, "committed")
    bodies = [record.body for record in client.pull_all("orders", 0)]
    assert [body for body in bodies if body != b"forged"] == [b"real %d" % n for n in range(HALVES)]


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_open_halves_survive_an_attack_and_a_restart(tmp_path: Path, is_killed: bool) -> None:
    with Server(tmp_path, conf=NO_CHECKS) as server:
        with server.client() as client:
            halves = park_all(client)
            attack(client, halves)
        if is_killed:
            server.kill()
        else:
            server.stop()
        server.start()
        with server.client() as client:
            assert_all_open(client, halves)


def test_an_administrator_cannot_move_the_cursor_either(tmp_path: Path) -> None:
    with broker_with_acl(tmp_path, NO_CHECKS) as server:
        with SignedClient(server.address, *ADMIN) as client:
            halves = park_all(client)
            attack(client, halves)
        server.kill()
        server.start()
        with SignedClient(server.address, *ADMIN) as client:
            assert_all_open(client, halves)
