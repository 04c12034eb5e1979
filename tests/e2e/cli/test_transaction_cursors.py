"""`escrowmq transaction cursors`, and the group under which RocketMQ stores the cursors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.remoting import COMMIT, Client, SendResult
from tests.support.brokers import Server
from tests.support.commands import run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path, conf={"transactionTimeOut": 600_000}) as broker:
        yield broker


def run_ok(served: Server, *arguments: str) -> str:
    result = run(*arguments, "-n", served.namesrv_address)
    assert result.code == 0, result.err
    return result.out


def park(client: Client, key: str) -> SendResult:
    return client.send_half("orders", b"body", {"UNIQ_KEY": key}, group="pay")


def test_cursors_show_both_queues_and_the_first_open_half(served: Server) -> None:
    with served.client() as client:
        client.end_transaction(park(client, "A"), COMMIT, topic="orders", group="pay")
        park(client, "B")
        client.end_transaction(park(client, "C"), COMMIT, topic="orders", group="pay")
    [row] = json.loads(run_ok(served, "transaction", "cursors", "--json"))
    assert row["half"] == {
        "topic": "RMQ_SYS_TRANS_HALF_TOPIC",
        "cursor": 1,
        "end": 3,
        "first_open": 1,
    }
    assert row["op"] == {"topic": "RMQ_SYS_TRANS_OP_HALF_TOPIC", "cursor": 1, "end": 2}
    assert (row["open"], row["stranded"]) == (1, 0)
    assert ISO.fullmatch(row["next_due"])
    heading, half_line, op_line = run_ok(served, "transaction", "cursors").splitlines()
    assert heading.split()[:4] == ["BROKER", "QUEUE", "CURSOR", "END"]
    assert half_line.split()[1:7] == ["RMQ_SYS_TRANS_HALF_TOPIC", "1", "3", "1", "1", "0"]
    assert op_line.split()[1:] == ["RMQ_SYS_TRANS_OP_HALF_TOPIC", "1", "2"]


def test_the_group_of_the_cursors_is_listed_only_with_all(served: Server) -> None:
    with served.client() as client:
        client.end_transaction(park(client, "A"), COMMIT, topic="orders", group="pay")

    def groups(*options: str) -> set[str]:
        rows = json.loads(run_ok(served, "group", "list", "--json", *options))
        return {row["group"] for row in rows}

    wait_until(lambda: "CID_RMQ_SYS_TRANS" in groups("--all"), "the cursors are stored")
    assert "CID_RMQ_SYS_TRANS" not in groups()
