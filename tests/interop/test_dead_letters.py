"""Dead letters of Apache RocketMQ's brokers are found, resent to their group only, and purged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from escrowmq import Message
from escrowmq.blocking import Consumer
from tests.interop import jars
from tests.interop.test_client_suite import Apache, new_broker
from tests.support.clients import WAIT_S
from tests.support.commands import run
from tests.support.dead_letters import bury, receive_all, send_and_bury
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.apache, pytest.mark.nightly]


@pytest.fixture(scope="module", params=jars.VERSIONS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Apache]:
    apache = new_broker(request.param, tmp_path_factory.mktemp("apache"))
    with apache:
        yield apache


def dead(server: Apache, *arguments: str) -> str:
    result = run("message", "dead", *arguments, "-n", server.namesrv_address)
    assert result.code == 0, result
    return result.out


def listed(server: Apache, group: str, *options: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        dead(server, "list", "--group", group, *options, "--json")
    )
    return rows


def wait_until_listed(server: Apache, group: str, count: int) -> None:
    """Wait until the broker has put its dead letters into their queue."""
    wait_until(lambda: len(listed(server, group)) == count, f"{count} dead letters of {group}")


def resend(server: Apache, *arguments: str) -> list[str]:
    lines = dead(server, "resend", *arguments, "--yes", "--json").splitlines()
    return [json.loads(line)["status"] for line in lines]


def test_a_dead_letter_is_resent_to_its_group_only_and_only_once(server: Apache) -> None:
    sent = Message("resent", b"body", keys="k", tags="t", properties={"color": "red"})
    [original] = send_and_bury(server, "g", sent, cause=ValueError("no such account"))
    assert len(receive_all(server, "g-beside", "resent", 1)) == 1
    wait_until_listed(server, "g", 1)
    [row] = listed(server, "g")
    assert (row["topic"], row["error_text"], row["attempts"]) == ("resent", "no such account", 1)
    assert resend(server, "--all", "--group", "g", "--error", "ValueError") == ["resent"]
    [received] = receive_all(server, "g", "resent", 1)
    assert (received.topic, received.body, received.keys) == ("resent", b"body", "k")
    assert received.properties["color"] == "red"
    assert received.message_id == original.message_id
    assert receive_all(server, "g-beside", "resent", 0) == []
    wait_until(lambda: listed(server, "g") == [], "the key index knows the copy")
    assert resend(server, "--all", "--group", "g") == []
    assert resend(server, row["id"]) == ["resent before"]
    assert [row["state"] for row in listed(server, "g", "--state", "resent")] == ["resent"]


def test_a_copy_that_fails_again_is_a_dead_letter_again(server: Apache) -> None:
    send_and_bury(server, "g-again", Message("again", b"x"), cause="first")
    wait_until_listed(server, "g-again", 1)
    assert resend(server, "--all", "--group", "g-again") == ["resent"]
    bury(server, "g-again", "again", 1, cause="second")
    wait_until(
        lambda: [row["error_text"] for row in listed(server, "g-again")] == ["second"],
        "only the second dead letter is open",
    )


def test_dead_letters_are_purged(server: Apache) -> None:
    send_and_bury(server, "g-purge", *(Message("purged", b"%d" % n) for n in range(3)))
    wait_until_listed(server, "g-purge", 3)
    assert resend(server, listed(server, "g-purge")[1]["id"]) == ["resent"]
    assert "2 dead letters purged" in dead(server, "purge", "--group", "g-purge", "--yes")
    assert listed(server, "g-purge") == []
    options = ("--state", "resent", "--state", "purged")
    states = [row["state"] for row in listed(server, "g-purge", *options)]
    assert states == ["purged", "resent", "purged"]


def test_an_orderly_group_of_rocketmq_5_makes_a_dead_letter_of_a_copy(server: Apache) -> None:
    """docs/operating.md says so, and that its members have to be stopped before."""
    send_and_bury(server, "g-ordered", Message("ordered", b"x"), orderly=True)
    wait_until_listed(server, "g-ordered", 1)
    with Consumer(
        server.namesrv_address, group="g-ordered", subscribe={"ordered": "*"}, orderly=True
    ) as consumer:
        assert consumer.receive(timeout_s=0.5) is None
        assert resend(server, "--all", "--group", "g-ordered") == ["resent"]
        if server.version.startswith("5"):
            wait_until_listed(server, "g-ordered", 2)
        else:
            message = consumer.receive(timeout_s=WAIT_S)
            assert message is not None
            assert message.body == b"x"


def test_doctor_names_the_groups_and_causes(server: Apache) -> None:
    send_and_bury(server, "g-doctor", Message("examined", b"x"), cause=ValueError("no"))
    wait_until_listed(server, "g-doctor", 1)
    checks = run("doctor", "--json", "-n", server.namesrv_address).json
    details = "\n".join(check["detail"] for check in checks)
    assert "group g-doctor has 1 open dead letter, the oldest for " in details
    assert ": 1 x ValueError" in details
