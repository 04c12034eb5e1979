"""`escrowmq message dead …` against a real broker: find, resend, export, purge."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from escrowmq import Message
from escrowmq.admin import Cluster
from escrowmq.blocking import Consumer, Producer
from tests.e2e.broker.test_metrics import BrokerWithMetrics
from tests.interop.remoting import Client
from tests.support.brokers import COMMAND, WAIT_S, Server
from tests.support.clients import CONF
from tests.support.commands import CommandResult, run, run_on_terminal
from tests.support.dead_letters import (
    bury,
    copies,
    receive_all,
    send_and_bury,
    wait_for_copies,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


class BadPayload(Exception):
    """An error of an application."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerWithMetrics]:
    with BrokerWithMetrics(tmp_path_factory.mktemp("dead"), conf=CONF) as server:
        yield server


@pytest.fixture(autouse=True)
def use_cluster(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command without -n use this cluster."""
    monkeypatch.setenv("NAMESRV_ADDR", server.namesrv_address)


def dead(*arguments: str) -> CommandResult:
    result = run("message", "dead", *arguments)
    assert result.code == 0, result
    return result


def dead_json(*arguments: str) -> Any:
    return dead(*arguments, "--json").json


def resend(*arguments: str) -> list[dict[str, Any]]:
    """Resend without a question and return the results."""
    lines = dead("resend", *arguments, "--yes", "--json").lines
    return [json.loads(line) for line in lines]


def statuses(results: list[dict[str, Any]]) -> list[str]:
    return [result["status"] for result in results]


def states(group: str) -> list[str]:
    return [row["state"] for row in list_all(group)]


def list_all(group: str) -> list[dict[str, Any]]:
    options = [option for state in ("open", "resent", "purged") for option in ("--state", state)]
    rows: list[dict[str, Any]] = dead_json("list", "--group", group, *options)
    return rows


# --- list and show -------------------------------------------------------------------------------


def test_dead_letters_are_listed_by_every_filter(server: Server) -> None:
    first = Message("listed", b"1", keys="k-1 k-2", tags="new")
    send_and_bury(server, "g-list", first, cause=BadPayload("no such account"))
    send_and_bury(server, "g-list", Message("listed", b"2"), cause="an orderly refusal")
    other = send_and_bury(server, "g-other", Message("listed-too", b"3"), cause=BadPayload("no"))

    rows = dead_json("list", "--group", "g-list")
    assert [row["error_text"] for row in rows] == ["no such account", "an orderly refusal"]
    row = rows[0]
    assert row["error_type"] == f"{__name__}.BadPayload"
    assert (row["group"], row["topic"], row["state"]) == ("g-list", "listed", "open")
    assert (row["keys"], row["attempts"], "body" in row) == ("k-1 k-2", 1, False)
    assert row["failed_ms"] <= row["stored_ms"]

    def found(*options: str) -> list[str]:
        return [row["group"] + row["error_text"][:2] for row in dead_json("list", *options)]

    assert found("--error", "BadPayload", "--group", "g-list") == ["g-listno"]
    assert found("--error", f"{__name__}.BadPayload", "--topic", "listed-too") == ["g-otherno"]
    assert found("--error", "Payload") == []
    assert found("--key", "k-2") == ["g-listno"]
    assert found("--key", other[0].message_id) == ["g-otherno"]
    assert found("--topic", "listed") == ["g-listno", "g-listan"]
    assert found("--attempts", "2", "--topic", "listed") == []
    since = f"{_iso(rows[1]['stored_ms'])}"
    assert found("--since", since, "--group", "g-list") == ["g-listan"]
    assert found("--until", _iso(rows[0]["stored_ms"]), "--group", "g-list") == ["g-listno"]
    assert len(dead("list", "--topic", "listed", "--limit", "1").lines) == 2
    assert dead("list", "--group", "nobody").out == "no dead letters\n"

    table = dead("list", "--group", "g-list").lines
    assert f"{__name__}.BadPayload: no such account" in table[1]
    text = dead("show", row["id"]).out
    assert "no such account" in text
    assert dead_json("show", other[0].message_id)["body"] == "3"
    assert "no dead letter" in run("message", "dead", "show", "A" * 32).err


def _iso(time_ms: int) -> str:
    from escrowmq.parsing import format_timestamp

    return format_timestamp(time_ms)


# --- resend --------------------------------------------------------------------------------------


def test_a_resent_dead_letter_reaches_its_group_only_and_only_once(server: Server) -> None:
    sent = Message("resent", b"body", keys="k", tags="t", properties={"color": "red"}, flag=7)
    [original] = send_and_bury(server, "g-resent", sent, cause=BadPayload("no"))
    assert len(receive_all(server, "g-beside", "resent", 1)) == 1

    assert "no such" not in dead("resend", "--all", "--group", "g-resent", "--dry-run").out
    assert copies(server, "g-resent") == []
    assert statuses(resend("--all", "--group", "g-resent")) == ["resent"]
    [received] = receive_all(server, "g-resent", "resent", 1)
    assert (received.topic, received.body, received.keys) == ("resent", b"body", "k")
    assert (received.tags, received.flag, received.reconsume_times) == ("t", 7, 0)
    assert received.properties["color"] == "red"
    assert (received.message_id, received.born_ms) == (original.message_id, original.born_ms)
    assert received.failure is None
    assert not {"DLQ_ORIGIN_TOPIC", "DELAY"} & received.properties.keys()
    assert receive_all(server, "g-beside", "resent", 0) == []

    assert resend("--all", "--group", "g-resent") == []
    [row] = list_all("g-resent")
    assert row["state"] == "resent"
    assert statuses(resend(row["id"])) == ["resent before"]
    assert len(copies(server, "g-resent")) == 1


def test_a_copy_that_fails_again_is_a_dead_letter_of_its_own(server: Server) -> None:
    send_and_bury(server, "g-again", Message("again", b"x"), cause="first")
    for cause in ("second", "third"):
        assert statuses(resend("--all", "--group", "g-again")) == ["resent"]
        bury(server, "g-again", "again", 1, cause=cause)
    assert states("g-again") == ["resent", "resent", "open"]
    assert [row["error_text"] for row in dead_json("list", "--group", "g-again")] == ["third"]
    assert statuses(resend("--all", "--group", "g-again")) == ["resent"]
    assert len(receive_all(server, "g-again", "again", 1)) == 1
    assert states("g-again") == ["resent"] * 3


def test_a_resend_that_is_killed_is_continued(server: Server) -> None:
    group, count = "g-killed", 30
    messages = [Message("killed", b"%d" % number) for number in range(count)]
    send_and_bury(server, group, *messages)
    resending = subprocess.Popen(
        [COMMAND, "message", "dead", "resend", "--all", "--group", group, "--yes", "--rate", "20"],
        stdout=subprocess.DEVNULL,
    )
    wait_for_copies(server, group, 3)
    resending.kill()
    resending.wait(WAIT_S)
    done = len(copies(server, group))
    assert 3 <= done < count
    assert statuses(resend("--all", "--group", group)) == ["resent"] * (count - done)
    bodies = [message.body for message in receive_all(server, group, "killed", count)]
    assert sorted(bodies) == sorted(message.body for message in messages)


def test_what_was_resent_is_known_after_a_crash_of_the_broker(tmp_path: Path) -> None:
    with Server(tmp_path, conf=CONF) as server:
        options = ("-n", server.namesrv_address, "--yes", "--json")
        send_and_bury(server, "g", Message("t", b"1"), Message("t", b"2"))
        first = run("message", "dead", "list", "-n", server.namesrv_address, "--json").json[0]
        assert run("message", "dead", "resend", first["id"], *options).code == 0
        server.kill()
        server.start()
        results = run("message", "dead", "resend", "--all", *options).lines
        assert [json.loads(line)["status"] for line in results] == ["resent"]
        assert sorted(copy.body for copy in copies(server, "g")) == [b"1", b"2"]


def test_a_resend_whose_broker_is_killed_is_continued(tmp_path: Path) -> None:
    count = 40
    with Server(tmp_path, conf=CONF) as server:
        send_and_bury(server, "g", *(Message("t", b"%d" % number) for number in range(count)))
        arguments = ("message", "dead", "resend", "--all", "-n", server.namesrv_address, "--yes")
        resending = subprocess.Popen(
            [COMMAND, *arguments, "--rate", "40"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_copies(server, "g", 5)
        server.kill()
        assert resending.wait(WAIT_S) == 2
        server.start()
        before = len(copies(server, "g"))
        assert 5 <= before < count
        assert run(*arguments).lines[-1] == f"{count - before} resent, 0 resent before, 0 failed"
        assert sorted(copy.body for copy in copies(server, "g")) == sorted(
            b"%d" % number for number in range(count)
        )


def test_a_group_that_consumes_in_order_gets_what_is_resent(server: Server) -> None:
    """Other sends to its retry topic become dead letters, because it has locks on its queues."""
    send_and_bury(server, "g-ordered", Message("ordered", b"x"), orderly=True)
    with Consumer(
        server.namesrv_address, group="g-ordered", subscribe={"ordered": "*"}, orderly=True
    ) as consumer:
        assert consumer.receive(timeout_s=0.2) is None  # it is connected and has its locks
        assert statuses(resend("--all", "--group", "g-ordered")) == ["resent"]
        message = consumer.receive(timeout_s=WAIT_S)
        assert message is not None
        assert (message.topic, message.body) == ("ordered", b"x")
    assert states("g-ordered") == ["resent"]


def test_a_committed_message_and_a_delayed_one_are_delivered_at_once(server: Server) -> None:
    with Producer(server.namesrv_address, group="p-special") as producer:
        with producer.transaction(Message("special", b"committed")):
            pass
        producer.send(Message("special", b"delayed", delay_level=1))
    bury(server, "g-special", "special", 2)
    assert statuses(resend("--all", "--group", "g-special")) == ["resent"] * 2
    received = receive_all(server, "g-special", "special", 2)
    assert {message.body for message in received} == {b"committed", b"delayed"}
    for message in received:
        assert not {"DELAY", "TRAN_MSG"} & message.properties.keys()


def test_a_message_without_a_unique_key_is_remembered_too(server: Server) -> None:
    with server.client() as client:
        client.create_topic("keyless", queues=1)
        client.send("keyless", b"x")
    bury(server, "g-keyless", "keyless", 1)
    assert statuses(resend("--all", "--group", "g-keyless")) == ["resent"]
    assert states("g-keyless") == ["resent"]
    assert statuses(resend(list_all("g-keyless")[0]["id"])) == ["resent before"]


def test_a_dead_letter_of_unknown_origin_is_reported(server: Server) -> None:
    with server.client() as client:
        client.create_topic("%DLQ%g-origin", queues=1)
        client.send("%DLQ%g-origin", b"x", {"UNIQ_KEY": "U1"})
    result = run("message", "dead", "resend", "--all", "--group", "g-origin", "--yes")
    assert result.code == 2
    assert "it does not say which topic it was sent to" in result.err
    assert result.lines[-1] == "0 resent, 0 resent before, 1 failed"


def test_resend_asks_and_says_how_many(server: Server) -> None:
    send_and_bury(server, "g-asked", Message("asked", b"1"), Message("asked", b"2"))
    arguments = ("message", "dead", "resend", "--all", "--group", "g-asked")
    assert "--yes" in run(*arguments).err
    options = ("-n", server.namesrv_address)
    screen = run_on_terminal(*arguments, *options, answer="n")
    assert "Resend 2 dead letters (2 to g-asked)?" in screen
    assert copies(server, "g-asked") == []
    assert "2 resent, 0 resent before, 0 failed" in run_on_terminal(
        *arguments, *options, answer="y"
    )
    usage = run("message", "dead", "resend", "--group", "g-asked", "--yes")
    assert "give the IDs of dead letters, or --all with filters, or --file" in usage.err


# --- export --------------------------------------------------------------------------------------


def test_exported_dead_letters_are_corrected_and_resent(server: Server, tmp_path: Path) -> None:
    binary = bytes(range(256))
    messages = [
        Message("export", body, keys="k") for body in (b"{amount: 1}", binary, "ü".encode())
    ]
    send_and_bury(server, "g-export", *messages)
    lines = [json.loads(line) for line in dead("export", "--group", "g-export").lines]
    by_body = {line.get("body"): line for line in lines}
    assert set(by_body) == {"{amount: 1}", None, "ü"}
    assert by_body["ü"]["properties"]["KEYS"] == "k"

    by_body["{amount: 1}"]["body"] = '{"amount": 1}'
    file = tmp_path / "dead.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert statuses(resend("--file", str(file))) == ["resent"] * 3
    received = receive_all(server, "g-export", "export", 3)
    assert {message.body for message in received} == {b'{"amount": 1}', binary, "ü".encode()}
    assert statuses(resend("--file", str(file))) == ["resent before"] * 3

    file.write_text('{"id": 7}\n')
    result = run("message", "dead", "resend", "--file", str(file), "--yes")
    assert "line 1: this is no exported dead letter" in result.err


# --- purge, metrics, doctor ----------------------------------------------------------------------


def test_purge_moves_the_cursor_up_to_the_first_that_does_not_match(
    server: BrokerWithMetrics,
) -> None:
    group = "g-purge"

    def metric(name: str) -> float:
        return server.page().value(name, consumer_group=group)

    def doctor() -> str:
        return "\n".join(check["detail"] for check in run("doctor", "--json").json)

    for cause in ("bad", "bad", "good", "bad", "good"):
        error = BadPayload(cause) if cause == "bad" else ValueError(cause)
        send_and_bury(server, group, Message("purged", cause.encode()), cause=error)
    assert metric("escrowmq_open_dead_letters") == 5
    assert metric("rocketmq_send_to_dlq_messages_total") == 5
    assert f"group {group} has 5 open dead letters, the oldest for " in doctor()
    assert f": 3 x {__name__}.BadPayload, 2 x ValueError" in doctor()

    arguments = ("purge", "--group", group, "--error", "BadPayload")
    [planned] = dead_json(*arguments, "--dry-run")
    assert (planned["old_cursor"], planned["new_cursor"]) == (0, 2)
    assert (planned["purged"], planned["blocked"]) == (2, 1)
    assert states(group) == ["open"] * 5
    assert "--yes" in run("message", "dead", *arguments).err
    result = dead(*arguments, "--yes")
    assert "2 dead letters purged" in result.out
    assert f"1 dead letter of {group} stayed open" in result.err
    assert states(group) == ["purged", "purged", "open", "open", "open"]
    assert metric("escrowmq_open_dead_letters") == 3

    # The cursor also moves over what is resent.
    good = dead_json("list", "--group", group, "--error", "ValueError")[0]
    assert statuses(resend(good["id"])) == ["resent"]
    assert metric("escrowmq_open_dead_letters") == 2
    assert metric("escrowmq_oldest_dead_letter_seconds") >= 0
    assert states(group) == ["purged", "purged", "resent", "open", "open"]
    # What was given up can still be resent.
    assert statuses(resend(list_all(group)[0]["id"])) == ["resent"]
    dead("purge", "--group", group, "--yes")
    assert states(group) == ["resent", "purged", "resent", "purged", "purged"]
    assert metric("escrowmq_open_dead_letters") == 0
    assert metric("escrowmq_oldest_dead_letter_seconds") == 0
    assert f"group {group} has 2 unread messages" in doctor()  # the copies
    assert not re.search(f"{group} .*dead letter", doctor())
    assert "give --group" in run("message", "dead", "purge", "--yes").err


def test_a_dead_letter_topic_that_is_deleted_and_created_again_begins_open(
    server: Server,
) -> None:
    send_and_bury(server, "g-new", Message("new", b"1"), Message("new", b"2"))
    dead("purge", "--group", "g-new", "--yes")
    assert run("topic", "delete", "%DLQ%g-new", "--yes").code == 0
    send_and_bury(server, "g-new", Message("new-too", b"3"))
    assert [row["topic"] for row in dead_json("list", "--group", "g-new")] == ["new-too"]


# --- several brokers, permissions ----------------------------------------------------------------


def test_dead_letters_of_all_brokers_are_found_and_resent_where_they_are(
    server: Server, tmp_path: Path
) -> None:
    conf = {**CONF, "brokerName": "broker-b", "namesrvAddr": server.namesrv_address}
    with (
        Server(tmp_path, role="broker", conf=conf) as second,
        Cluster(server.namesrv_address) as cluster,
    ):
        wait_until(lambda: len(cluster.brokers(fresh=True)) == 2, "both brokers are registered")
        for broker in (server, second):
            with broker.client() as client:
                bury_by_hand(client, "g-both", "both")
        rows = dead_json("list", "--group", "g-both")
        assert [row["broker"] for row in rows] == ["broker-a", "broker-b"]
        only = dead_json("list", "--group", "g-both", "--broker", "broker-b")
        assert [row["broker"] for row in only] == ["broker-b"]
        assert statuses(resend("--all", "--group", "g-both")) == ["resent"] * 2
        assert [len(copies(broker, "g-both")) for broker in (server, second)] == [1, 1]
        assert resend("--all", "--group", "g-both") == []


def bury_by_hand(client: Client, group: str, topic: str) -> None:
    """Send a message and move it to the dead letters of a group, with raw requests."""
    client.create_topic(topic, queues=1)
    client.create_group(group)
    sent = client.send(topic, b"x", {"UNIQ_KEY": f"U-{client.address}"})
    fields = {"offset": sent.log_offset, "group": group, "delayLevel": -1, "originTopic": topic}
    client.expect(36, fields)
