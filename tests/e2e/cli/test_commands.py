"""`escrowmq topic|group|message|broker|doctor …` against a real broker."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import get_completion_class

from escrowmq.cli.main import cli
from tests.interop.remoting import Client
from tests.support.brokers import COMMAND, WAIT_S, Server
from tests.support.commands import CommandResult, run, run_on_terminal
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
NO_CHECKS = {"transactionTimeOut": 600_000, "transactionCheckInterval": 600_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("commands"), conf=NO_CHECKS) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def use_cluster(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command without -n use this cluster."""
    monkeypatch.setenv("NAMESRV_ADDR", server.namesrv_address)


def run_ok(*arguments: str, stdin: bytes = b"") -> CommandResult:
    result = run(*arguments, stdin=stdin)
    assert result.code == 0, result
    return result


def run_json(*arguments: str) -> Any:
    result = run_ok(*arguments, "--json")
    assert result.err == ""
    return result.json


def run_refused(*arguments: str) -> str:
    result = run(*arguments)
    assert result.code == 2, result
    return result.err


def send(client: Client, topic: str, *bodies: bytes, keys: str = "", queue: int = 0) -> None:
    for body in bodies:
        client.send(topic, body, {"KEYS": keys} if keys else {}, queue_id=queue)


@contextmanager
def dead_broker(server: Server) -> Iterator[str]:
    """Register a broker that does not run with the name server. Yields its address."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    fields = {
        "brokerName": "broker-dead",
        "brokerAddr": address,
        "clusterName": "DefaultCluster",
        "haServerAddr": "",
        "brokerId": 0,
        "compressed": False,
        "bodyCrc32": 0,
    }
    with server.namesrv_client() as name_server:
        name_server.expect(103, fields, b'{"topicConfigSerializeWrapper":{},"filterServerList":[]}')
        yield address
        del fields["haServerAddr"], fields["compressed"], fields["bodyCrc32"]
        name_server.expect(104, fields)


# --- topics --------------------------------------------------------------------------------------


def test_a_topic_is_created_shown_changed_and_deleted(client: Client) -> None:
    assert "would be created" in run_ok("topic", "create", "life", "--dry-run").out
    assert "life" not in run_ok("topic", "list").out
    run_ok("topic", "create", "life", "--queues", "2", "--attribute", "color=red")
    assert "escrowmq topic update" in run_refused("topic", "create", "life")
    send(client, "life", b"1", b"2")
    [row] = [row for row in run_json("topic", "list", "-l") if row["topic"] == "life"]
    assert (row["read_queues"], row["perm"], row["messages"]) == (2, "rw", 2)
    assert ISO.fullmatch(row["last_stored"])
    assert "TBW102" not in run_ok("topic", "list").out
    assert "TBW102" in run_ok("topic", "list", "--all").out

    [topic] = run_json("topic", "show", "life")["brokers"]
    assert topic["attributes"] == {"color": "red"}
    assert [queue["end"] for queue in topic["queues"]] == [2, 0]
    assert "-> 4 queues" in run_ok("topic", "update", "life", "--queues", "4", "--dry-run").out
    run_ok("topic", "update", "life", "--queues", "4", "--perm", "r", "--attribute", "color=")
    [topic] = run_json("topic", "show", "life")["brokers"]
    assert (topic["read_queues"], topic["perm"], topic["attributes"]) == (4, "r", {})
    assert "--yes" in run_refused("topic", "update", "life", "--queues", "1")
    run_ok("topic", "update", "life", "--queues", "1", "--yes")

    assert "2 messages" in run_ok("topic", "delete", "life", "--dry-run").out
    assert "--yes" in run_refused("topic", "delete", "life")
    assert "life  deleted on 1 broker" in run_ok("topic", "delete", "life", "--yes").out
    assert "escrowmq topic list" in run_refused("topic", "show", "life")
    assert "escrowmq topic list" in run_refused("topic", "delete", "life", "--yes")


# --- groups --------------------------------------------------------------------------------------


def test_a_group_is_shown_reset_and_deleted(client: Client) -> None:
    client.create_topic("bills", queues=1)
    client.create_group("pay")
    send(client, "bills", *(b"%d" % number for number in range(5)))
    client.commit_offset("pay", "bills", 0, 3)
    [row] = [row for row in run_json("group", "list") if row["group"] == "pay"]
    assert (row["lag"], row["members"], row["topics"]) == (2, 0, ["bills"])
    [queue] = run_json("group", "lag", "pay")
    assert (queue["read"], queue["end"], queue["lag"]) == (3, 5, 2)
    assert ISO.fullmatch(queue["read_up_to"])
    assert next(row for row in run_json("group", "lag") if row["group"] == "pay")["lag"] == 2
    assert "no member is connected" in run_ok("group", "show", "pay").out
    assert "group lag" not in run_refused("group", "show", "nope")

    planned = run_json("group", "reset", "pay", "--to", "earliest", "--dry-run")
    assert [(move["from"], move["to"]) for move in planned] == [(3, 0)]
    assert client.committed_offset("pay", "bills", 0) == 3
    assert "--yes" in run_refused("group", "reset", "pay", "--to", "earliest")
    run_ok("group", "reset", "pay", "--to", "earliest", "--yes")
    assert client.committed_offset("pay", "bills", 0) == 0
    run_ok("group", "reset", "pay", "--to", "latest", "--topic", "bills", "--yes")
    assert client.committed_offset("pay", "bills", 0) == 5
    run_ok("group", "reset", "pay", "--to", "2020-01-01T00:00", "--yes")
    assert client.committed_offset("pay", "bills", 0) == 0
    assert "2026-01-01T00:00" in run_refused("group", "reset", "pay", "--to", "soon")
    assert "group list" in run_refused("group", "reset", "nope", "--to", "latest", "--yes")

    assert "5 messages not read" in run_ok("group", "delete", "pay", "--dry-run").out
    run_ok("group", "delete", "pay", "--yes")
    assert "pay" not in [row["group"] for row in run_json("group", "list")]


def test_a_deletion_needs_a_confirmation(client: Client) -> None:
    client.create_topic("doomed", queues=1)
    send(client, "doomed", b"1")
    assert "Nothing was changed." in run_on_terminal("topic", "delete", "doomed", answer="n")
    assert run_json("topic", "show", "doomed")["brokers"][0]["messages"] == 1
    assert "doomed  deleted" in run_on_terminal("topic", "delete", "doomed", answer="y")


# --- messages ------------------------------------------------------------------------------------


def test_a_message_is_found_by_key_id_and_offset(client: Client, tmp_path: Path) -> None:
    client.create_topic("letters", queues=2)
    sent = run_json(
        *("message", "send", "letters", "--body", "hello", "--key", "k1", "--key", "k2"),
        *("--tag", "new", "--property", "a=b", "--sharding-key", "s"),
    )
    assert sent["status"] == "SEND_OK"
    position = ("--queue", str(sent["queue"]), "--offset", str(sent["queue_offset"]))
    for option in (
        ("--key", "k1"),
        ("--key", "k2", "--since", "2020-01-01"),
        ("--unique-key", sent["unique_key"]),
        ("--id", sent["id"]),
        position,
    ):
        message = run_json("message", "find", "letters", *option)
        assert message["id"] == sent["id"], option
    assert (message["body"], message["tags"], message["keys"]) == ("hello", "new", "k1 k2")
    assert message["properties"]["a"] == "b"
    for name in (sent["id"], sent["unique_key"]):
        assert run_json("message", "show", name)["body"] == "hello"
    text = run_ok("message", "show", sent["unique_key"], "--topic", "letters").out
    assert text.endswith("\nhello\n")

    for option in (
        ("--key", "none"),
        ("--key", "k1", "--until", "2020-01-01"),
        ("--unique-key", "none"),
        ("--offset", "99"),
    ):
        assert "no message" in run_refused("message", "find", "letters", *option)
    assert "one of --key" in run_refused("message", "find", "letters")
    assert "no message" in run_refused("message", "show", "F" * 32)

    (tmp_path / "body").write_bytes(b"\xff\x00\x01")
    sent = run_json("message", "send", "letters", "--file", str(tmp_path / "body"))
    assert run_json("message", "show", sent["id"])["body_hex"] == "ff0001"
    assert "ff 00 01" in run_ok("message", "show", sent["id"]).out


def test_each_line_of_standard_input_is_a_message(client: Client) -> None:
    client.create_topic("lines", queues=1)
    assert (
        "would send 3 bytes" in run_ok("message", "send", "lines", "--dry-run", stdin=b"one\n").out
    )
    result = run_ok("message", "send", "lines", "--json", stdin=b"one\ntwo\n\n\r\nthree")
    assert len(result.lines) == 3
    assert [record.body for record in client.pull_all("lines", 0)] == [b"one", b"two", b"three"]
    assert "nothing to send" in run_refused("message", "send", "lines")
    assert "NAME=VALUE" in run_refused("message", "send", "lines", "--body", "x", "--property", "y")


def test_a_delayed_message_is_not_delivered_at_once(client: Client) -> None:
    client.create_topic("later", queues=1)
    run_ok("message", "send", "later", "--body", "x", "--delay", "2h")
    assert client.max_offset("later", 0) == 0


def test_options_of_tail_choose_the_start_and_filter_messages(client: Client) -> None:
    client.create_topic("tailed", queues=2)
    for number in range(6):
        tags = "even" if number % 2 == 0 else "odd"
        client.send("tailed", b"%d" % number, {"TAGS": tags}, queue_id=number % 2)

    def bodies(*options: str) -> list[str]:
        result = run_ok("message", "tail", "tailed", "--no-follow", "--json", *options)
        return [json.loads(line)["body"] for line in result.lines]

    assert sorted(bodies("--from", "earliest")) == list("012345")
    assert bodies("--from", "earliest", "--tag", "even") == list("024")
    assert len(bodies("--from", "earliest", "--limit", "2")) == 2
    assert sorted(bodies("--from", "2020-01-01T00:00+02:00")) == list("012345")
    assert bodies() == []
    assert "escrowmq topic list" in run_refused("message", "tail", "nowhere")


def test_tail_follows_a_topic_and_changes_no_group(server: Server, client: Client) -> None:
    client.create_topic("followed", queues=1)
    client.create_group("reader")
    send(client, "followed", b"first")
    client.commit_offset("reader", "followed", 0, 1)
    groups = run_json("group", "list", "--all")
    process = subprocess.Popen(
        [COMMAND, "message", "tail", "followed", "--from", "earliest", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["body"] == "first"
        send(client, "followed", b"second")
        assert json.loads(process.stdout.readline())["body"] == "second"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    groups_after = run_json("group", "list", "--all")
    assert [row["group"] for row in groups_after] == [row["group"] for row in groups]
    assert client.committed_offset("reader", "followed", 0) == 1


# --- brokers -------------------------------------------------------------------------------------


def test_broker_commands_show_runtime_info_and_change_settings(
    server: Server, client: Client
) -> None:
    [row] = run_json("broker", "list")
    assert (row["broker"], row["address"]) == ("broker-a", server.address)
    assert row["takes_messages"]
    assert "brokerVersionDesc" in run_ok("broker", "show", "broker-a").out
    assert "escrowmq broker list" in run_refused("broker", "show", "unknown")
    key = "escrowInFlightBytesMax"
    before = run_json("broker", "config", "get", key)["broker-a"][key]
    pair = f"{key}={int(before) + 1}"
    assert f"{before} -> " in run_ok("broker", "config", "set", pair, "--dry-run").out
    assert "--yes" in run_refused("broker", "config", "set", pair)
    assert run_json("broker", "config", "get", key)["broker-a"][key] == before
    run_ok("broker", "config", "set", pair, "--yes")
    assert run_json("broker", "config", "get", key)["broker-a"][key] == str(int(before) + 1)
    assert "restart" in run_refused("broker", "config", "set", "listenPort=1", "--yes")
    assert "config get" in run_refused("broker", "config", "get", "nothing")


def test_top_shows_rates_between_two_samples(client: Client) -> None:
    client.create_topic("busy", queues=1)
    process = subprocess.Popen(
        [COMMAND, "broker", "top", "--every", "0.3", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        rates = [0.0]
        while not rates[0]:
            send(client, "busy", b"1")
            sample = json.loads(process.stdout.readline())
            rates = [row["in_per_s"] for row in sample["topics"] if row["topic"] == "busy"]
        assert sample["topics"][0]["topic"] == "busy"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()
    lines = run_ok("broker", "top", "--every", "0.1", "--count", "1").lines
    assert lines[0].startswith("escrowmq top  ")
    assert lines[2].split()[:3] == ["BROKER", "IN/S", "OUT/S"]


def test_on_a_terminal_each_result_replaces_the_one_before() -> None:
    screen = run_on_terminal("broker", "top", "--every", "0.1", "--count", "2")
    assert screen.count("escrowmq top  ") >= 2
    assert "\x1b[1A" in screen  # the cursor moves up, so that the first result is overwritten


def test_watch_repeats_a_list_until_it_is_interrupted(server: Server) -> None:
    process = subprocess.Popen(
        [COMMAND, "topic", "list", "--json", "--watch", "0.1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert isinstance(json.loads(process.stdout.readline()), list)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


# --- several brokers, and brokers that fail ------------------------------------------------------


def test_a_broker_that_fails_does_not_hide_the_others(server: Server, client: Client) -> None:
    client.create_topic("seen", queues=1)
    send(client, "seen", b"1", keys="k")
    with dead_broker(server) as address:
        for arguments in (
            ("topic", "list"),
            ("topic", "show", "seen"),
            ("group", "list"),
            ("group", "lag"),
            ("broker", "list"),
            ("broker", "config", "get"),
            ("message", "find", "seen", "--key", "k"),
            ("message", "tail", "seen", "--from", "earliest", "--no-follow"),
        ):
            result = run(*arguments)
            assert result.code == 2, arguments
            assert address in result.err, arguments
            assert result.out, arguments
        assert "nothing was changed" in run_refused("topic", "delete", "seen", "--yes")
        assert "nothing was changed" in run_refused("topic", "create", "other")
        result = run_ok("topic", "create", "other", "--broker", "broker-a")
        assert "created on broker-a" in result.out
        [problem] = [
            check
            for check in run("doctor", "--json", "--quiet").json
            if check["what"] == "broker broker-dead"
        ]
        assert problem["level"] == "problem"
    assert run_json("topic", "show", "seen")["brokers"][0]["messages"] == 1


def test_commands_use_all_brokers_of_a_cluster(server: Server, tmp_path: Path) -> None:
    conf = {"brokerName": "broker-b", "namesrvAddr": server.namesrv_address}
    with Server(tmp_path, role="broker", conf=conf) as second:
        wait_until(lambda: len(run_json("broker", "list")) == 2, "both brokers are listed")
        result = run_ok("topic", "create", "wide", "--queues", "1")
        assert [line.split(" on ")[1][:8] for line in result.lines] == ["broker-a", "broker-b"]
        for broker, body in ((server, b"a"), (second, b"b")):
            with broker.client() as client:
                client.create_group("wide-group")
                send(client, "wide", body, keys="same")
                client.commit_offset("wide-group", "wide", 0, 1)
        [row] = [row for row in run_json("topic", "list", "-l") if row["topic"] == "wide"]
        assert (row["brokers"], row["messages"]) == (["broker-a", "broker-b"], 2)
        lines = run_ok("message", "find", "wide", "--key", "same", "--json").lines
        assert [json.loads(line)["broker"] for line in lines] == ["broker-a", "broker-b"]
        tailed = run_ok("message", "tail", "wide", "--from", "earliest", "--no-follow").lines
        assert len(tailed) == 2
        run_ok("group", "reset", "wide-group", "--to", "earliest", "--yes")
        assert [row["lag"] for row in run_json("group", "lag", "wide-group")] == [1, 1]
        run_ok("topic", "delete", "wide", "--yes")
        assert "wide" not in run_ok("topic", "list").out


def test_an_unreachable_name_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("NAMESRV_ADDR", f"127.0.0.1:{port}")
    for arguments in (("topic", "list"), ("group", "lag"), ("broker", "list")):
        assert f"127.0.0.1:{port} cannot be reached" in run_refused(*arguments)


# --- completion ----------------------------------------------------------------------------------


def complete_words(*words: str) -> list[str]:
    """Return the completions of the last word."""
    completion_class = get_completion_class("bash")
    assert completion_class is not None
    shell = completion_class(cli, {}, "escrowmq", "_ESCROWMQ_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_names_are_completed_and_an_unreachable_cluster_has_none(client: Client) -> None:
    client.create_topic("completed-topic")
    client.create_group("completed-group")
    assert complete_words("topic", "show", "completed-t") == ["completed-topic"]
    assert complete_words("group", "lag", "completed-g") == ["completed-group"]
    assert complete_words("topic", "list", "--broker", "br") == ["broker-a"]
    assert complete_words("topic", "show", "-n", "127.0.0.1:1", "completed") == []
    assert "_ESCROWMQ_COMPLETE" in run_ok("completion", "bash").out


# --- doctor --------------------------------------------------------------------------------------


def run_doctor(*arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Return the exit code and the results by level."""
    result = run("doctor", "--json", *arguments)
    checks: dict[str, list[dict[str, Any]]] = {"ok": [], "warning": [], "problem": []}
    for check in result.json:
        assert bool(check["remedy"]) == (check["level"] != "ok"), check
        checks[check["level"]].append(check)
    return result.code, checks


def details(checks: list[dict[str, Any]]) -> str:
    return "\n".join(check["detail"] for check in checks)


def test_doctor_finds_stranded_transactions_absent_groups_and_dead_letters(tmp_path: Path) -> None:
    conf = {
        "transactionTimeOut": 300,
        "transactionCheckInterval": 300,
        "transactionCheckMax": 1,
        "escrowInsecure": "true",
        "bindAddress": "0.0.0.0",
        "brokerIP1": "127.0.0.1",
    }
    with Server(tmp_path, conf=conf) as server, server.client() as client:
        options = ("-c", str(server.conf), "--data", str(server.data), "-n", server.namesrv_address)
        client.create_topic("orders", queues=1)
        client.create_group("absent")
        send(client, "orders", b"1", b"2")
        client.commit_offset("absent", "orders", 0, 1)
        client.create_topic("%DLQ%absent", queues=1)
        send(client, "%DLQ%absent", b"dead")
        client.heartbeat("me", producer_groups=("pay",))
        client.send_half("orders", b"h", {"UNIQ_KEY": "A"}, group="pay")
        wait_until(
            lambda: "stranded" in details(run_doctor(*options)[1]["problem"]),
            "the transaction is stranded",
        )
        code, checks = run_doctor(*options)
    assert code == 1
    assert details(checks["problem"]) == (
        "1 transaction is stranded: the broker does not check them any more"
    )
    warnings = details(checks["warning"])
    assert "group absent has 1 unread message and no connected member" in warnings
    assert "group absent has 1 open dead letter, the oldest for " in warnings
    assert ": 1 x unknown" in warnings
    assert "listens on 0.0.0.0 and accepts every client without an account" in warnings
    assert "its clock agrees with this machine's clock" in details(checks["ok"])
    assert "a broker is running on it" in details(checks["ok"])


def test_doctor_finds_problems_of_this_machine(tmp_path: Path, server: Server) -> None:
    conf = tmp_path / "broker.conf"
    port = server.address.rpartition(":")[2]
    conf.write_text(f"listenPort={port}\nbindAddress=0.0.0.0\nescrowNamesrvPort=0\n")
    code, checks = run_doctor("--local", "-c", str(conf), "--data", str(tmp_path / "data"))
    assert code == 1
    assert "no broker is running on the data directory" in details(checks["problem"])
    assert "0.0.0.0 without accounts: serve refuses to start" in details(checks["problem"])
    assert "the first start creates it" in details(checks["ok"])

    (tmp_path / "crashed").mkdir()
    (tmp_path / "crashed" / "abort").touch()
    conf.write_text("listenPort=0\nescrowNamesrvPort=0\n")
    code, checks = run_doctor("--local", "-c", str(conf), "--data", str(tmp_path / "crashed"))
    assert code == 0
    assert "was not shut down properly" in details(checks["warning"])

    conf.write_text("listenPort=many\n")
    code, checks = run_doctor("--local", "-c", str(conf))
    assert code == 1
    assert "listenPort" in details(checks["problem"])
