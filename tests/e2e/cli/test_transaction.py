"""`escrowmq transaction …` against a real broker: list, explain, decide and resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, Client, SendResult
from tests.support.brokers import Server
from tests.support.commands import CommandResult, run_on_terminal
from tests.support.commands import run as run_command
from tests.support.ports import free_ports
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

NO_CHECKS = {"transactionTimeOut": 600_000, "transactionCheckInterval": 600_000}
QUICK_CHECKS = {
    "transactionTimeOut": 300,
    "transactionCheckInterval": 300,
    "transactionCheckMax": 2,
}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def run(server: Server | None, *arguments: str) -> CommandResult:
    servers = () if server is None else ("-n", server.namesrv_address)
    return run_command("transaction", *arguments, *servers)


def list_json(server: Server, *filters: str) -> list[dict[str, Any]]:
    result = run(server, "list", "--json", *filters)
    assert (result.code, result.err) == (0, "")
    entries = result.json
    assert isinstance(entries, list)
    return entries


def list_ids(server: Server, *filters: str) -> list[str]:
    return [entry["transaction_id"] for entry in list_json(server, *filters)]


def explain(server: Server, name: str) -> str:
    result = run(server, "explain", name)
    assert (result.code, result.err) == (0, "")
    return result.out


def show_json(server: Server, name: str) -> dict[str, Any]:
    result = run(server, "show", name, "--json")
    assert (result.code, result.err) == (0, "")
    return dict(result.json)


def park(client: Client, key: str, topic: str = "orders", group: str = "pay") -> SendResult:
    return client.send_half(topic, b"of " + key.encode(), {"UNIQ_KEY": key}, group=group)


def pull_bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [record.body for record in client.pull_all(topic, 0)]


@pytest.fixture
def unchecking(tmp_path: Path) -> Iterator[Server]:
    """Run a broker that sends no check during a test."""
    with Server(tmp_path, conf=NO_CHECKS) as server:
        yield server


@pytest.fixture
def checking(tmp_path: Path) -> Iterator[Server]:
    """Run a broker that checks every 300 ms, and strands a transaction after two checks."""
    with Server(tmp_path, conf=QUICK_CHECKS) as server:
        yield server


# --- list, show and explain ----------------------------------------------------------------------


def test_a_list_has_the_documented_fields_and_filters(unchecking: Server) -> None:
    assert list_json(unchecking) == []
    assert run(unchecking, "list").out == "no transactions\n"
    with unchecking.client() as client:
        park(client, "A")
        park(client, "B", topic="bills")
        park(client, "C", group="ship")
        client.end_transaction(park(client, "D"), COMMIT, topic="orders", group="pay")
        client.end_transaction(park(client, "E"), ROLLBACK, topic="orders", group="pay")
    first = list_json(unchecking)[0]
    names = ("transaction_id", "group", "topic", "state", "checks")
    assert [first[name] for name in names] == ["A", "pay", "orders", "open", 0]
    assert ISO.fullmatch(first["parked_at"])
    assert ISO.fullmatch(first["next_due"])
    assert first["next_due"] > first["parked_at"]
    assert list_ids(unchecking) == ["A", "B", "C"]
    assert list_ids(unchecking, "--topic", "orders") == ["A", "C"]
    assert list_ids(unchecking, "--group", "pay") == ["A", "B"]
    assert list_ids(unchecking, "--group", "pay", "--topic", "bills") == ["B"]
    assert list_ids(unchecking, "--older-than", "10m") == []
    assert list_ids(unchecking, "--older-than", "0s") == ["A", "B", "C"]
    assert list_ids(unchecking, "--checks", "1") == []
    assert list_ids(unchecking, "--state", "stranded") == []
    assert list_ids(unchecking, "--state", "committed") == ["D"]
    assert list_ids(unchecking, "--state", "rolled_back", "--state", "open") == ["E", "A", "B", "C"]
    limited = run(unchecking, "list", "--json", "--limit", "2")
    assert len(limited.json) == 2
    assert "more than 2" in limited.err
    table = run(unchecking, "list").out.splitlines()
    assert table[0].split("  ")[0] == "TRANSACTION"
    assert [line.split()[0] for line in table[1:]] == ["A", "B", "C"]


def test_the_history_of_a_check_names_the_producer_and_its_verdict(tmp_path: Path) -> None:
    conf = {"transactionTimeOut": 300, "transactionCheckInterval": 600_000}  # a single check
    with Server(tmp_path, conf=conf) as server, server.client() as client:
        half = park(client, "A")
        header, _ = client.receive_frame()
        assert header["code"] == 39
        assert "has not been answered" in show_json(server, "A")["pending_because"]
        answer_check(client, half, UNKNOWN)
        # Requests of a connection are read in order, so the broker has read the verdict now.
        assert client.max_offset("orders", 0) == 0
        assert "was answered with UNKNOWN" in show_json(server, "A")["pending_because"]
        assert list_ids(server, "--checks", "1") == ["A"]
        answer_check(client, half, COMMIT)
        wait_until(lambda: client.max_offset("orders", 0) == 1, "the message is delivered")
        steps = show_json(server, "A")["steps"]
        assert [step["what"] for step in steps] == ["parked", "asked", "unknown", "committed"]
        peer = steps[0]["who"]
        assert steps[1]["who"] == peer
        text = explain(server, "A")
    assert f"checked         asked {peer} (check 1)" in text
    assert f"answered        {peer} does not know yet (check 1)" in text
    delivery = "delivered to queue 0 of topic orders at offset 0"
    assert f"committed       by check {peer}; {delivery}" in text
    assert "next:  nothing: the transaction is decided" in text
    steps_with_time = [line for line in text.splitlines() if ISO.search(line)]
    assert len(steps_with_time) == 4
    assert re.search(
        r"^ +half: RMQ_SYS_TRANS_HALF_TOPIC queue 0 offset 0, log offset \d+$", text, re.M
    )
    assert re.search(r"^ +final: orders queue 0 offset 0, log offset \d+$", text, re.M)
    assert re.search(r"^ +op: RMQ_SYS_TRANS_OP_HALF_TOPIC queue 0 offset 0, log offset", text, re.M)


def answer_check(client: Client, half: SendResult, verdict: int) -> None:
    """Send a verdict as the response to a check; it is a one-way request."""
    client.send_one_way(
        37,
        {
            "topic": "orders",
            "producerGroup": "pay",
            "tranStateTableOffset": half.queue_offset,
            "commitLogOffset": half.log_offset,
            "commitOrRollback": verdict,
            "fromTransactionCheck": True,
            "msgId": half.transaction_id,
            "transactionId": half.transaction_id,
        },
    )


def test_an_open_transaction_is_explained(unchecking: Server) -> None:
    with unchecking.client() as client:
        park(client, "A")
        text = explain(unchecking, "A")
    assert "transaction A of group pay for topic orders" in text.splitlines()[0]
    assert "why:   its producer has not decided yet" in text
    assert f"the broker checks with the producer at {list_json(unchecking)[0]['next_due']}" in text
    fields = run(unchecking, "show", "A").out
    assert re.search(r"^state +open$", fields, re.MULTILINE)


# --- commit and rollback -------------------------------------------------------------------------


def test_a_commit_by_an_operator_delivers_once_and_is_final(unchecking: Server) -> None:
    with unchecking.client() as client:
        half = park(client, "A")
        result = run(unchecking, "commit", "A", "--reason", "in the books", "--yes", "--as", "ann")
        assert (result.code, result.out, result.err) == (0, "A  committed\n", "")
        assert pull_bodies(client) == [b"of A"]
        conflict = client.end_transaction(half, ROLLBACK, topic="orders", group="pay")
        assert conflict.code == 3701
        assert client.end_transaction(half, COMMIT, topic="orders", group="pay").code == 0
        repeated = run(unchecking, "commit", "A", "--reason", "r", "--yes")
        assert (repeated.code, repeated.out) == (0, "A  already committed\n")
        contrary = run(unchecking, "rollback", "A", "--reason", "r", "--yes")
        assert contrary.code == 2
        assert "is committed" in contrary.err
        assert pull_bodies(client) == [b"of A"]
    assert 'by operator ann: "in the books"; delivered to' in explain(unchecking, "A")
    assert list_ids(unchecking) == []


def test_an_id_of_several_transactions_needs_the_group_or_the_offset(unchecking: Server) -> None:
    with Client(unchecking.address) as client:
        client.create_topic("orders", queues=1)
        client.send_half("orders", b"of a stranger", {"UNIQ_KEY": "A"}, group="strangers")
        half = park(client, "A")
        decision = ("--reason", "it is paid", "--yes")
        for command in (("commit", "A", *decision), ("show", "A"), ("explain", "A")):
            refused = run(unchecking, *command)
            assert refused.code == 2
            assert "'strangers'" in refused.err
            assert f"half offset {half.queue_offset}" in refused.err
            assert "--group" in refused.err
        assert pull_bodies(client) == []
        assert run(unchecking, "show", "A", "--group", "pay").code == 0
        offset = str(half.queue_offset)
        committed = run(unchecking, "commit", "A", "--offset", offset, *decision)
        assert (committed.code, committed.err) == (0, "")
        assert pull_bodies(client) == [b"of A"]
        assert [entry["group"] for entry in list_json(unchecking)] == ["strangers"]
        assert run(unchecking, "rollback", "A", "--group", "strangers", *decision).code == 0
        assert list_json(unchecking) == []


def test_all_transactions_that_match_the_filters_are_decided(unchecking: Server) -> None:
    with unchecking.client() as client:
        for number in range(150):
            park(client, f"K{number:03d}", topic="orders" if number % 3 else "bills")
        command = ("rollback", "--all", "--topic", "orders", "--reason", "test data", "--json")
        result = run(unchecking, *command, "--yes")
        outcomes = result.json
        assert result.code == 0
        assert len(outcomes) == 100
        assert {outcome["state"] for outcome in outcomes} == {"rolled_back"}
        assert {entry["topic"] for entry in list_json(unchecking)} == {"bills"}
        assert run(unchecking, *command, "--yes").out == "[]\n"
        result = run(unchecking, "commit", "K000", "K003", "--reason", "r", "--yes")
        assert result.out == "K000  committed\nK003  committed\n2 done, 0 refused\n"
        assert pull_bodies(client, "bills") == [b"of K000", b"of K003"]


def test_a_decision_needs_a_confirmation(unchecking: Server) -> None:
    with unchecking.client() as client:
        park(client, "A")
    result = run(unchecking, "commit", "A", "--reason", "r")
    assert result.code == 2
    assert "--yes" in result.err
    for answer, open_ids in (("n", ["A"]), ("y", [])):
        text = run_on_terminal(
            *("transaction", "commit", "A", "--reason", "r", "-n", unchecking.namesrv_address),
            answer=answer,
        )
        assert "Commit this transaction? [y/N]" in text
        assert list_ids(unchecking) == open_ids


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("commit", "A", "--yes"), "--reason", id="no reason"),
        pytest.param(("commit", "--reason", "r", "--yes"), "--all", id="no transaction"),
        pytest.param(
            ("commit", "A", "--all", "--reason", "r", "--yes"), "--all", id="id and --all"
        ),
        pytest.param(
            ("commit", "A", "--topic", "T", "--reason", "r", "--yes"), "--all", id="id and filter"
        ),
        pytest.param(("list", "--older-than", "soon"), "not a duration", id="not a duration"),
        pytest.param(("list", "--broker", "nowhere"), "HOST:PORT", id="not an address"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...], expected: str) -> None:
    result = run(None, *arguments)
    assert result.code == 2
    assert expected in result.err


def test_an_unknown_transaction_is_an_error(unchecking: Server) -> None:
    for command in (("show", "X"), ("explain", "X"), ("commit", "X", "--reason", "r", "--yes")):
        result = run(unchecking, *command)
        assert result.code == 2
        assert "no transaction X on" in result.err
    blank_reason = run(unchecking, "commit", "X", "--reason", " ", "--yes")
    assert blank_reason.code == 2


# --- stranded transactions -----------------------------------------------------------------------


def test_a_resumed_transaction_is_checked_again(checking: Server) -> None:
    with checking.client() as client:
        half = park(client, "A")
        wait_until(lambda: list_ids(checking, "--state", "stranded") == ["A"], "A is stranded")
        [entry] = list_json(checking, "--checks", "2")
        assert (entry["state"], entry["next_due"], entry["checks"]) == ("stranded", None, 2)
        text = explain(checking, "A")
        assert "why:   checked 2 times: 2 without an answer; it waits for an operator" in text
        assert "escrowmq transaction resume|commit|rollback A" in text
        codes = [client.receive_frame()[0]["code"] for _ in range(2)]
        result = run(checking, "resume", "A", "--yes", "--as", "ann", "--reason", "fixed it")
        assert (result.code, result.out, result.err) == (0, "A  open\n", "")
        codes.append(client.receive_frame()[0]["code"])
        assert codes == [39, 39, 39]
        assert 'resumed         by operator ann: "fixed it"' in explain(checking, "A")
        wait_until(
            lambda: list_ids(checking, "--state", "stranded") == ["A"], "A is stranded again"
        )
        assert client.end_transaction(half, COMMIT, topic="orders", group="pay").code == 0
        assert pull_bodies(client) == [b"of A"]
    result = run(checking, "resume", "A", "--yes")
    assert result.code == 2
    assert "stranded or set aside" in result.err


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_histories_survive_a_restart(checking: Server, killed: bool) -> None:
    with checking.client() as client:
        client.end_transaction(park(client, "C"), COMMIT, topic="orders", group="pay")
        client.end_transaction(park(client, "R"), ROLLBACK, topic="orders", group="pay")
        park(client, "H")
        run(checking, "rollback", "H", "--reason", "customer called", "--yes", "--as", "ann")
        park(client, "S")
        park(client, "L")
        wait_until(
            lambda: list_ids(checking, "--state", "stranded") == ["S", "L"], "both are stranded"
        )
        run(checking, "commit", "L", "--reason", "late", "--yes", "--as", "ann")
    before = {key: show_json(checking, key) for key in "CRHSL"}
    if killed:
        checking.kill()
        checking.start()
    else:
        checking.restart()
    after = {key: show_json(checking, key) for key in "CRHSL"}
    for history in (*before.values(), *after.values()):
        history.pop("why")  # a short form of the steps
        # A running broker takes the time from its monotonic clock, and after a restart from the
        # record. They can differ by a millisecond. The first step has the record's time in both.
        history.pop("parked_at")
    assert after == before
    assert [step["what"] for step in after["S"]["steps"]] == [
        *("parked", "asked", "asked", "stranded")
    ]
    assert after["L"]["steps"][-1]["who"] == "operator ann"
    assert after["L"]["steps"][-1]["reason"] == "late"
    with checking.client() as client:
        assert pull_bodies(client) == [b"of C", b"of L"]


# --- several brokers, and other servers ----------------------------------------------------------


def test_commands_use_all_brokers_of_a_cluster(unchecking: Server, tmp_path: Path) -> None:
    conf = {**NO_CHECKS, "namesrvAddr": unchecking.namesrv_address, "brokerName": "broker-b"}
    with Server(tmp_path / "b", role="broker", conf=conf) as other:
        with unchecking.client() as client, other.client() as other_client:
            park(client, "A")
            park(client, "twice")
            park(other_client, "B")
            park(other_client, "twice")
        wait_until(lambda: list_ids(unchecking) == ["A", "twice", "B", "twice"], "both are listed")
        assert {entry["broker"] for entry in list_json(unchecking)} == {"broker-a", "broker-b"}
        assert show_json(unchecking, "B")["broker"] == "broker-b"
        ambiguous = run(unchecking, "commit", "twice", "--reason", "r", "--yes")
        assert ambiguous.code == 2
        assert "is on several brokers" in ambiguous.err
        on_one_broker = ("rollback", "twice", "--reason", "r", "--yes", "--broker", other.address)
        assert run(None, *on_one_broker).code == 0
        assert list_ids(unchecking) == ["A", "twice", "B"]
        result = run(unchecking, "rollback", "--all", "--reason", "r", "--yes")
        assert result.out.endswith("3 done, 0 refused\n")
        assert list_ids(unchecking) == []


def test_an_unreachable_name_server_is_named() -> None:
    [port] = free_ports(1)
    result = run(None, "list", "-n", f"127.0.0.1:{port}")
    assert result.code == 2
    assert f"127.0.0.1:{port} cannot be reached" in result.err


def test_a_broker_without_transaction_requests_is_named() -> None:
    """Apache RocketMQ responds like this."""

    def refuse(request: Request[Any]) -> bytes:
        code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        return encode_response(request, code=code, remark="not supported")

    with ScriptedServer(refuse) as server:
        result = run(None, "list", "--json", "--broker", server.address)
    assert result.code == 2
    assert "does not support LIST_TRANSACTIONS: it is not an EscrowMQ broker" in result.err
