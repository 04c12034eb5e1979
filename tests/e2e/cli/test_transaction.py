"""`escrowmq transaction …` against a real broker: list, explain, and decide by hand."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.remoting import COMMIT, ROLLBACK, UNKNOWN, Client, SendResult
from tests.support.brokers import COMMAND, WAIT_S, Served
from tests.support.commands import run_on_terminal
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

PATIENT = {"transactionTimeOut": 600_000, "transactionCheckInterval": 600_000}
HASTY = {"transactionTimeOut": 300, "transactionCheckInterval": 300, "transactionCheckMax": 2}
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def run(served: Served | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = () if served is None else ("-n", served.namesrv_address)
    return subprocess.run(
        [COMMAND, "transaction", *arguments, *where],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def list_json(served: Served, *filters: str) -> list[dict[str, Any]]:
    result = run(served, "list", "--json", *filters)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def list_ids(served: Served, *filters: str) -> list[str]:
    return [entry["transaction_id"] for entry in list_json(served, *filters)]


def explain(served: Served, name: str) -> str:
    result = run(served, "explain", name)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def show_json(served: Served, name: str) -> dict[str, Any]:
    result = run(served, "show", name, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def park(client: Client, key: str, topic: str = "orders", group: str = "pay") -> SendResult:
    return client.send_half(topic, b"of " + key.encode(), {"UNIQ_KEY": key}, group=group)


def pull_bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [record.body for record in client.pull_all(topic, 0)]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, conf=PATIENT) as served:
        yield served


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, conf=HASTY) as served:
        yield served


# --- looking -------------------------------------------------------------------------------------


def test_a_list_has_the_promised_shape_and_filters(patient: Served) -> None:
    assert list_json(patient) == []
    assert run(patient, "list").stdout == "no transactions\n"
    with patient.client() as client:
        park(client, "A")
        park(client, "B", topic="bills")
        park(client, "C", group="ship")
        client.end_transaction(park(client, "D"), COMMIT, topic="orders", group="pay")
        client.end_transaction(park(client, "E"), ROLLBACK, topic="orders", group="pay")
    first = list_json(patient)[0]
    promised = ("transaction_id", "group", "topic", "state", "checks")
    assert [first[name] for name in promised] == ["A", "pay", "orders", "open", 0]
    assert ISO.fullmatch(first["parked_at"])
    assert ISO.fullmatch(first["next_due"])
    assert first["next_due"] > first["parked_at"]
    assert list_ids(patient) == ["A", "B", "C"]
    assert list_ids(patient, "--topic", "orders") == ["A", "C"]
    assert list_ids(patient, "--group", "pay") == ["A", "B"]
    assert list_ids(patient, "--group", "pay", "--topic", "bills") == ["B"]
    assert list_ids(patient, "--older-than", "10m") == []
    assert list_ids(patient, "--older-than", "0s") == ["A", "B", "C"]
    assert list_ids(patient, "--checks", "1") == []
    assert list_ids(patient, "--state", "stranded") == []
    assert list_ids(patient, "--state", "committed") == ["D"]
    assert list_ids(patient, "--state", "rolled_back", "--state", "open") == ["E", "A", "B", "C"]
    limited = run(patient, "list", "--json", "--limit", "2")
    assert len(json.loads(limited.stdout)) == 2
    assert "more than 2" in limited.stderr
    table = run(patient, "list").stdout.splitlines()
    assert table[0].split("  ")[0] == "TRANSACTION"
    assert [line.split()[0] for line in table[1:]] == ["A", "B", "C"]


def test_the_history_of_a_check_names_the_producer_and_its_answer(tmp_path: Path) -> None:
    asking = {"transactionTimeOut": 300, "transactionCheckInterval": 600_000}
    with Served(tmp_path, conf=asking) as served, served.client() as client:
        half = park(client, "A")
        header, _ = client.receive_frame()
        assert header["code"] == 39
        assert "has not been answered" in show_json(served, "A")["pending_because"]
        answer_check(client, half, UNKNOWN)
        assert client.max_offset("orders", 0) == 0  # lines are read in order
        assert "was answered with UNKNOWN" in show_json(served, "A")["pending_because"]
        assert list_ids(served, "--checks", "1") == ["A"]
        answer_check(client, half, COMMIT)
        wait_until(lambda: client.max_offset("orders", 0) == 1, "the message is delivered")
        steps = show_json(served, "A")["steps"]
        assert [step["what"] for step in steps] == ["parked", "asked", "unknown", "committed"]
        peer = steps[0]["who"]
        assert steps[1]["who"] == peer
        text = explain(served, "A")
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


def test_an_open_transaction_is_explained(patient: Served) -> None:
    with patient.client() as client:
        park(client, "A")
        text = explain(patient, "A")
    assert "transaction A of group pay for topic orders" in text.splitlines()[0]
    assert "why:   its producer has not decided yet" in text
    assert f"the broker checks with the producer at {list_json(patient)[0]['next_due']}" in text
    fields = run(patient, "show", "A").stdout
    assert re.search(r"^state +open$", fields, re.MULTILINE)


# --- deciding ------------------------------------------------------------------------------------


def test_a_commit_by_hand_delivers_once_and_stands(patient: Served) -> None:
    with patient.client() as client:
        half = park(client, "A")
        result = run(patient, "commit", "A", "--reason", "in the books", "--yes", "--as", "ann")
        assert (result.returncode, result.stdout, result.stderr) == (0, "A  committed\n", "")
        assert pull_bodies(client) == [b"of A"]
        late = client.end_transaction(half, ROLLBACK, topic="orders", group="pay")
        assert late.code == 3701
        assert client.end_transaction(half, COMMIT, topic="orders", group="pay").code == 0
        again = run(patient, "commit", "A", "--reason", "r", "--yes")
        assert (again.returncode, again.stdout) == (0, "A  already committed\n")
        against = run(patient, "rollback", "A", "--reason", "r", "--yes")
        assert against.returncode == 2
        assert "is committed" in against.stderr
        assert pull_bodies(client) == [b"of A"]
    assert 'by operator ann: "in the books"; delivered to' in explain(patient, "A")
    assert list_ids(patient) == []


def test_all_transactions_that_match_the_filters_are_decided(patient: Served) -> None:
    with patient.client() as client:
        for number in range(150):
            park(client, f"K{number:03d}", topic="orders" if number % 3 else "bills")
        command = ("rollback", "--all", "--topic", "orders", "--reason", "test data", "--json")
        result = run(patient, *command, "--yes")
        outcomes = json.loads(result.stdout)
        assert result.returncode == 0
        assert len(outcomes) == 100
        assert {outcome["state"] for outcome in outcomes} == {"rolled_back"}
        assert {entry["topic"] for entry in list_json(patient)} == {"bills"}
        assert run(patient, *command, "--yes").stdout == "[]\n"
        two = run(patient, "commit", "K000", "K003", "--reason", "r", "--yes")
        assert two.stdout == "K000  committed\nK003  committed\n2 done, 0 refused\n"
        assert pull_bodies(client, "bills") == [b"of K000", b"of K003"]


def test_a_decision_needs_a_confirmation(patient: Served) -> None:
    with patient.client() as client:
        park(client, "A")
    result = run(patient, "commit", "A", "--reason", "r")
    assert result.returncode == 2
    assert "--yes" in result.stderr
    for answer, left in (("n", ["A"]), ("y", [])):
        text = run_on_terminal(
            *("transaction", "commit", "A", "--reason", "r", "-n", patient.namesrv_address),
            answer=answer,
        )
        assert "Commit this transaction? [y/N]" in text
        assert list_ids(patient) == left


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(("commit", "A", "--yes"), "--reason", id="no reason"),
        pytest.param(("commit", "--reason", "r", "--yes"), "--all", id="nothing named"),
        pytest.param(("commit", "A", "--all", "--reason", "r", "--yes"), "--all", id="both"),
        pytest.param(("commit", "A", "--topic", "T", "--reason", "r", "--yes"), "--all", id="mix"),
        pytest.param(("list", "--older-than", "soon"), "not a duration", id="no duration"),
        pytest.param(("list", "--broker", "nowhere"), "HOST:PORT", id="no address"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...], expected: str) -> None:
    result = run(None, *arguments)
    assert result.returncode == 2
    assert expected in result.stderr


def test_an_unknown_transaction_is_an_error(patient: Served) -> None:
    for command in (("show", "X"), ("explain", "X"), ("commit", "X", "--reason", "r", "--yes")):
        result = run(patient, *command)
        assert result.returncode == 2
        assert "no transaction X on" in result.stderr
    blank = run(patient, "commit", "X", "--reason", " ", "--yes")
    assert blank.returncode == 2


# --- stranded ------------------------------------------------------------------------------------


def test_a_resumed_transaction_is_checked_again(hasty: Served) -> None:
    with hasty.client() as client:
        half = park(client, "A")
        wait_until(lambda: list_ids(hasty, "--state", "stranded") == ["A"], "A is stranded")
        [entry] = list_json(hasty, "--checks", "2")
        assert (entry["state"], entry["next_due"], entry["checks"]) == ("stranded", None, 2)
        text = explain(hasty, "A")
        assert "why:   checked 2 times: 2 without an answer; it waits for an operator" in text
        assert "escrowmq transaction resume|commit|rollback A" in text
        asked = [client.receive_frame()[0]["code"] for _ in range(2)]
        result = run(hasty, "resume", "A", "--yes", "--as", "ann", "--reason", "fixed it")
        assert (result.returncode, result.stdout, result.stderr) == (0, "A  open\n", "")
        asked.append(client.receive_frame()[0]["code"])
        assert asked == [39, 39, 39]
        assert 'resumed         by operator ann: "fixed it"' in explain(hasty, "A")
        wait_until(lambda: list_ids(hasty, "--state", "stranded") == ["A"], "A is stranded again")
        assert client.end_transaction(half, COMMIT, topic="orders", group="pay").code == 0
        assert pull_bodies(client) == [b"of A"]
    result = run(hasty, "resume", "A", "--yes")
    assert result.returncode == 2
    assert "stranded or set aside" in result.stderr


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_histories_survive_a_restart(hasty: Served, killed: bool) -> None:
    with hasty.client() as client:
        client.end_transaction(park(client, "C"), COMMIT, topic="orders", group="pay")
        client.end_transaction(park(client, "R"), ROLLBACK, topic="orders", group="pay")
        park(client, "H")
        run(hasty, "rollback", "H", "--reason", "customer called", "--yes", "--as", "ann")
        park(client, "S")
        park(client, "L")
        wait_until(lambda: list_ids(hasty, "--state", "stranded") == ["S", "L"], "both strand")
        run(hasty, "commit", "L", "--reason", "late", "--yes", "--as", "ann")
    before = {key: show_json(hasty, key) for key in "CRHSL"}
    if killed:
        hasty.kill()
        hasty.start()
    else:
        hasty.restart()
    after = {key: show_json(hasty, key) for key in "CRHSL"}
    for story in (*before.values(), *after.values()):
        story.pop("why")  # in the list; the story has it in full
        # By the broker's own steady time while it lives, afterwards by the record's stamp: a
        # millisecond apart, by rounding. The first step has the stamp in both.
        story.pop("parked_at")
    assert after == before
    assert [step["what"] for step in after["S"]["steps"]] == [
        *("parked", "asked", "asked", "stranded")
    ]
    assert after["L"]["steps"][-1]["who"] == "operator ann"
    assert after["L"]["steps"][-1]["reason"] == "late"
    with hasty.client() as client:
        assert pull_bodies(client) == [b"of C", b"of L"]


# --- others --------------------------------------------------------------------------------------


def test_all_brokers_of_a_cluster_are_asked(patient: Served, tmp_path: Path) -> None:
    conf = {**PATIENT, "namesrvAddr": patient.namesrv_address, "brokerName": "broker-b"}
    with Served(tmp_path / "b", role="broker", conf=conf) as other:
        with patient.client() as client, other.client() as other_client:
            park(client, "A")
            park(client, "twice")
            park(other_client, "B")
            park(other_client, "twice")
        wait_until(lambda: list_ids(patient) == ["A", "twice", "B", "twice"], "both are listed")
        assert {entry["broker"] for entry in list_json(patient)} == {"broker-a", "broker-b"}
        assert show_json(patient, "B")["broker"] == "broker-b"
        both = run(patient, "commit", "twice", "--reason", "r", "--yes")
        assert both.returncode == 2
        assert "is on several brokers" in both.stderr
        at_one = ("rollback", "twice", "--reason", "r", "--yes", "--broker", other.address)
        assert run(None, *at_one).returncode == 0
        assert list_ids(patient) == ["A", "twice", "B"]
        rest = run(patient, "rollback", "--all", "--reason", "r", "--yes")
        assert rest.stdout.endswith("3 done, 0 refused\n")
        assert list_ids(patient) == []


def test_an_unreachable_name_server_is_named() -> None:
    [port] = free_ports(1)
    result = run(None, "list", "-n", f"127.0.0.1:{port}")
    assert result.returncode == 2
    assert f"127.0.0.1:{port} cannot be reached" in result.stderr


def test_a_broker_without_transaction_requests_is_named() -> None:
    """Apache RocketMQ responds like this."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=refuse_one, args=(server,))
        answering.start()
        port = server.getsockname()[1]
        result = run(None, "list", "--json", "--broker", f"127.0.0.1:{port}")
        answering.join(WAIT_S)
    assert result.returncode == 2
    assert "does not support LIST_TRANSACTIONS: it is not an EscrowMQ broker" in result.stderr


def refuse_one(server: socket.socket) -> None:
    line, _ = server.accept()
    with line:
        frame = line.recv(65_536)
        length = int.from_bytes(frame[5:8], "big")
        asked = json.loads(frame[8 : 8 + length])
        header = json.dumps(
            {"code": 3, "flag": 1, "opaque": asked["opaque"], "remark": "not supported"}
        ).encode()
        prefix = (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big")
        line.sendall(prefix + header)
