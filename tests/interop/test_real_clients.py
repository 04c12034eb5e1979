"""Unmodified clients of other projects send to our broker and receive from it.

Each client runs each of its scenarios in its own process, with its own broker. Clients that share
code share mistakes, so these differ in language, age and authors: Apache's Java clients 4.9.7 and
5.5.0, C++ libraries with wrappers for Python (`rocketmq-client-python`, `rocketmq`) and for Node.js
(`rocketmq-nodejs`), and one written in JavaScript (`ali-ons`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.clients.scenarios import ScenarioResult, run_scenario
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.skipping import call_or_skip

QUEUES = 4
MESSAGES = 8
GROUP = "readers"
# Some clients cannot set the delay before a retry; for them it has the levels 3, 4, 5.
SETTINGS = {
    "messageDelayLevel": "1s 1s 1s 1s 1s 2s",
    "transactionTimeOut": 2_000,
    "transactionCheckInterval": 1_000,
    "enablePropertyFilter": "true",
}

Check = Callable[[ScenarioResult], None]


# --- what a client must have received ------------------------------------------------------------


def bodies(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(event["body"] for event in events)


def each_message_once(result: ScenarioResult) -> None:
    """Every sent message was received once and unchanged."""
    assert all(event["status"] == "ok" for event in result.sent)
    assert bodies(result.received) == bodies(result.sent)
    assert len(result.received) >= 3
    for event in result.received:
        assert event["times"] == 0
        assert (event["tag"], event["key"]) == ("tag", f"key-{len(event['body'])}")
        assert event.get("colour", "größer") == "größer"
    same_queue_and_offset(result)


def same_queue_and_offset(result: ScenarioResult) -> None:
    """Queue and offset in the response to a send are those of the received message."""
    received = {event["body"]: event for event in result.received}
    for sent in result.sent:
        for field in ("queue", "offset"):
            if field in sent and field in received.get(sent["body"], {}):
                assert received[sent["body"]][field] == sent[field], sent["body"]


def all_messages(kind: str) -> Check:
    def check(result: ScenarioResult) -> None:
        assert all(event["status"] == "ok" for event in result.sent)
        assert bodies(result.received) == Counter(f"{kind}-{number}" for number in range(MESSAGES))

    return check


def after_their_delay(result: ScenarioResult) -> None:
    assert all(event["status"] == "ok" for event in result.sent)
    assert bodies(result.received) == bodies(result.sent)
    assert len(result.received) == 3
    for event in result.received:
        assert 900 <= event["waited_ms"] < 10_000


def only_messages_with_a_subscribed_tag(result: ScenarioResult) -> None:
    assert [event["status"] for event in result.sent] == ["ok"] * 5
    assert bodies(result.received) == Counter(["tagged-red", "tagged-green"])


def only_messages_that_match_the_expression(result: ScenarioResult) -> None:
    assert [event["status"] for event in result.sent] == ["ok"] * 7
    expected = ["sql-11/red/t", "sql-12/it's/t", "sql-null/red/vip"]
    assert bodies(result.received) == Counter(expected)


def subscription_refused_with_the_position_of_the_error(result: ScenarioResult) -> None:
    [refused] = result.all("refused")
    assert refused["code"] == 23
    assert "at character 9" in refused["reason"]


def in_order(result: ScenarioResult) -> None:
    """Three orders have six steps each. Those of one order are in one queue, in sequence."""
    assert [event["status"] for event in result.sent] == ["ok"] * 18
    assert bodies(result.received) == bodies(result.sent)
    for order in "012":
        steps = [event for event in result.received if event["body"].startswith(f"{order}/")]
        assert [event["body"] for event in steps] == [f"{order}/{step}" for step in range(6)]
        assert len({event["queue"] for event in steps}) == 1


def in_order_with_a_retry(result: ScenarioResult) -> None:
    """The consumer failed once at 1/2 and received it again, before the messages after it."""
    assert [event["status"] for event in result.sent] == ["ok"] * 18
    attempts = [event for event in result.received if event["body"] == "1/2"]
    assert [event["times"] for event in attempts] == [0, 1]
    result.events.remove(attempts[0])
    in_order(result)


def every_message_to_both_consumers(result: ScenarioResult) -> None:
    for client in "12":
        received = [event for event in result.received if event["client"] == client]
        assert bodies(received) == Counter(f"broadcast-{number}" for number in range(MESSAGES))


def queues_shared_by_both_consumers(result: ScenarioResult) -> None:
    assert [event["queues"] for event in result.all("assigned")] == [2, 2]
    assert bodies(result.received) == bodies(result.sent)
    assert len(result.sent) == 2 * MESSAGES
    assert {event["client"] for event in result.received} == {"1", "2"}
    owners = {(event["client"], event["queue"]) for event in result.received}
    assert len(owners) == QUEUES  # no queue has two consumers


def resumed_at_the_committed_offset(result: ScenarioResult) -> None:
    """The second consumer continues where the first one stopped."""
    assert len(result.sent) == 2 * MESSAGES
    assert bodies(result.received) == bodies(result.sent)
    for event in result.received:
        assert event["body"].startswith(f"{event['by']}/")


def three_attempts(result: ScenarioResult) -> None:
    attempts = [(event["body"], event["times"]) for event in result.received]
    assert sorted(attempts) == [("again", 0), ("again", 1), ("again", 2), ("fine", 0)]
    # The client shows a message from the retry topic under its original topic.
    assert len({event["topic"] for event in result.received}) == 1


def dead_letter_after(attempt_count: int) -> Check:
    def check(result: ScenarioResult) -> None:
        attempts = [event["times"] for event in result.received if event["client"] == "1"]
        assert attempts == list(range(attempt_count))
        [dead] = [event for event in result.received if event["client"] == "pull"]
        assert dead["body"] == "dead"
        assert (dead["tag"], dead["key"], dead["colour"]) == ("tag", "key-4", "größer")

    return check


def bad_message_is_a_dead_letter_and_the_next_is_consumed(result: ScenarioResult) -> None:
    attempts = [
        (event["body"], event["times"]) for event in result.received if event["client"] == "1"
    ]
    assert attempts == [("bad", 0), ("bad", 1), ("good", 0)]
    assert [event["body"] for event in result.received if event["client"] == "pull"] == ["bad"]


def pulled_with_offsets_and_long_polling(result: ScenarioResult) -> None:
    each_message_once(result)
    queues = result.all("queue")
    assert (
        [event["begin"] for event in queues] == [event["first"] for event in queues] == [0] * QUEUES
    )
    assert sum(event["end"] for event in queues) == MESSAGES
    assert [event["committed"] for event in queues] == [event["end"] for event in queues]
    ends = [event["end"] for event in queues]
    assert [event["next"] for event in result.all("beyond")] == ends
    assert {event["status"] for event in result.all("beyond")} == {"OFFSET_ILLEGAL"}
    [awaited] = result.all("awaited")
    assert awaited["status"] == "FOUND"
    assert awaited["ms"] < 5_000


def continued_by_a_second_lite_pull_consumer(result: ScenarioResult) -> None:
    each_message_once(result)
    assert [event["body"] for event in result.received if event["client"] == "2"] == ["lite-later"]


def messages_after_a_seek(result: ScenarioResult) -> None:
    assert [event["body"] for event in result.received] == [
        f"seek-{number}" for number in (5, 6, 7)
    ]


def found_in_every_way(result: ScenarioResult) -> None:
    ways = {f"key one-{GROUP}", f"key two-{GROUP}", "offset id", "unique key"}
    assert Counter(event["client"] for event in result.received) == Counter(ways)
    assert {event["body"] for event in result.received} == {"sought"}


def every_request_has_its_reply(result: ScenarioResult) -> None:
    expected = [f"reply to request-{number}" for number in range(3)]
    assert [event["body"] for event in result.all("reply-received")] == expected
    assert [event["status"] for event in result.all("reply-sent")] == ["ok"] * 3


# --- transactions --------------------------------------------------------------------------------
# A body starts with a plan: the verdict of the local transaction, then those of the checks.


def exactly_the_committed(result: ScenarioResult) -> None:
    """Every committed message was received once, no other; no half was checked too often."""
    assert all(event["status"] == "ok" for event in result.sent)
    plans = {event["body"]: event["body"].partition("/")[0].split(",") for event in result.sent}
    assert len(plans) == len(result.sent) > 0
    assert Counter(event["body"] for event in result.all("local")) == Counter(list(plans))
    committed = [body for body, plan in plans.items() if plan[-1] == "commit"]
    assert bodies(result.received) == Counter(committed)
    for event in result.received:
        assert (event["times"], event["tag"], event["colour"]) == (0, "tag", "größer")
    for body, plan in plans.items():
        checks = [event for event in result.all("checked") if event["body"] == body]
        assert [event["times"] for event in checks] == [str(n) for n in range(1, len(plan))], body
        for event in checks:
            assert (event["topic"], event["tag"], event["colour"]) == ("orders", "tag", "größer")
            assert event["key"] == f"key-{len(body)}"


def committed_once_by_check_or_slow_transaction(result: ScenarioResult) -> None:
    """Each half was checked while its local transaction ran, which then committed.

    The check said UNKNOWN (the transaction commits), COMMIT (the second commit changes nothing),
    or ROLLBACK (the late commit is refused).
    """
    assert bodies(result.received) == Counter(["unknown/slow", "commit/slow"])
    assert bodies(result.all("checked")) == Counter(
        f"{verdict}/slow" for verdict in ("unknown", "commit", "rollback")
    )


def checked_at_the_sender_or_its_group(result: ScenarioResult) -> None:
    """The broker checks at the producer that sent a half, or at another if that one has left."""
    exactly_the_committed(result)
    assert len(result.all("checked")) == 3 * MESSAGES
    for event in result.all("checked"):
        sender = event["body"].split("/")[1]
        assert event["client"] in ({"1", "2"} if sender == "gone" else {sender})


def checked_after_the_immunity_time(result: ScenarioResult) -> None:
    exactly_the_committed(result)
    waited_ms = {event["body"].split("/")[1]: event["waited_ms"] for event in result.all("checked")}
    default_ms = SETTINGS["transactionTimeOut"]
    for seconds, min_ms in (("5", 5_000), ("1", 1_000), ("-1", default_ms), ("soon", default_ms)):
        assert waited_ms[seconds] >= min_ms
    assert waited_ms["1"] < waited_ms["-1"]  # a time shorter than the default is respected too
    assert "within" not in waited_ms


# --- the table -----------------------------------------------------------------------------------

BASIC: dict[str, Check] = {
    "sync": each_message_once,
    "autocreate": each_message_once,
    "async": each_message_once,
    "oneway": all_messages("oneway"),
    "batch": all_messages("batch"),
    "big": each_message_once,
    "delay": after_their_delay,
    "tags": only_messages_with_a_subscribed_tag,
    "orderly": in_order,
    "broadcast": all_messages("broadcast"),
    "retry": three_attempts,
    "pull": each_message_once,
}
JAVA: dict[str, Check] = {
    **BASIC,
    "orderly": in_order_with_a_retry,
    "orderly-dlq": bad_message_is_a_dead_letter_and_the_next_is_consumed,
    "broadcast": every_message_to_both_consumers,
    "rebalance": queues_shared_by_both_consumers,
    "resume": resumed_at_the_committed_offset,
    "dlq": dead_letter_after(2),
    "dlq-at-once": dead_letter_after(1),
    "pull": pulled_with_offsets_and_long_polling,
    "litepull": continued_by_a_second_lite_pull_consumer,
    "sql": only_messages_that_match_the_expression,
    "sql-refused": subscription_refused_with_the_position_of_the_error,
    "liteassign": messages_after_a_seek,
    "query": found_in_every_way,
    "reply": every_request_has_its_reply,
    "transaction": exactly_the_committed,
    "transaction-check": exactly_the_committed,
    "transaction-slow": committed_once_by_check_or_slow_transaction,
    "transaction-group": checked_at_the_sender_or_its_group,
    "transaction-immunity": checked_after_the_immunity_time,
}
CPP_TRANSACTIONS = {
    name: JAVA[name] for name in ("transaction", "transaction-check", "transaction-slow")
}


def basic(*names: str) -> dict[str, Check]:
    return {name: BASIC[name] for name in names}


TABLE: dict[str, dict[str, Check]] = {
    "java-5.5.0": {**JAVA, "timed": after_their_delay},  # 4.9.7 has delay levels only
    "java-4.9.7": JAVA,
    "rocketmq-client-python": basic(
        "sync", "autocreate", "oneway", "big", "delay", "tags", "orderly", "broadcast", "retry"
    )
    | CPP_TRANSACTIONS,
    "rocketmq": BASIC,
    "rocketmq-nodejs": basic("sync", "autocreate", "big", "tags", "retry"),
    "ali-ons": {**basic("sync", "big", "delay", "tags", "broadcast", "retry"), "sharded": in_order},
}
IN_CI = {  # `make interop` runs the rest
    ("java-5.5.0", "sync"),
    ("java-5.5.0", "transaction-check"),
    ("rocketmq-client-python", "transaction"),
    ("rocketmq", "sync"),
    ("rocketmq", "batch"),
}


def cases() -> Iterator[Any]:
    for client, scenarios in TABLE.items():
        for scenario, check in scenarios.items():
            marks = [pytest.mark.slow]
            if client.startswith("java"):
                marks.append(pytest.mark.apache)
            if (client, scenario) not in IN_CI:
                marks.append(pytest.mark.nightly)
            yield pytest.param(client, scenario, check, id=f"{client}-{scenario}", marks=marks)


@pytest.mark.parametrize(("client", "scenario", "check"), list(cases()))
def test_a_client_sends_and_receives(
    client: str, scenario: str, check: Check, tmp_path: Path
) -> None:
    with EscrowMQ(tmp_path / "ours", SETTINGS) as escrowmq:
        if scenario != "autocreate":
            escrowmq.create_topic("orders", queues=QUEUES)
        result = call_or_skip(
            f"client {client}",
            lambda: run_scenario(
                client,
                scenario,
                namesrv=escrowmq.namesrv_address,
                topic="orders",
                group=GROUP,
                directory=tmp_path / "client",
            ),
        )
        details = f"\n{result}\nour log:\n{escrowmq.log_tail()}"
        assert not result.all("failed"), details
        assert result.all("done"), details
        try:
            check(result)
        except AssertionError as error:
            error.add_note(details)
            raise
