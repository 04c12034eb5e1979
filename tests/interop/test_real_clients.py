"""Unmodified clients of others send to our broker and get from it what they should.

Each cell of client x scenario runs in a process of its own, against a broker of its own, and is
judged by what arrived. Two clients of one kind are no proof of each other, so the columns differ
in language, age and authors: Apache's Java clients of two generations, two C++ libraries behind
Python (A, B), one behind Node.js (C), one all in JavaScript (D), Apache's Go client, and the
Spring Boot starter, which wraps a Java client of a third release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.clients.environments import Unavailable
from tests.interop.clients.play import Told, play
from tests.interop.ours import EscrowMQ

QUEUES = 4
MESSAGES = 8
GROUP = "readers"
# A client that cannot say how long to wait until the next attempt takes levels 3, 4, 5.
SETTINGS = {
    "messageDelayLevel": "1s 1s 1s 1s 1s 2s",
    "transactionTimeOut": 2_000,
    "transactionCheckInterval": 1_000,
    "enablePropertyFilter": "true",
}

Check = Callable[[Told], None]


# --- what should have come -----------------------------------------------------------------------


def bodies(lines: list[dict[str, Any]]) -> Counter[str]:
    return Counter(line["body"] for line in lines)


def each_once(told: Told) -> None:
    """Everything that was sent arrived, once and unchanged."""
    assert all(line["status"] == "ok" for line in told.sent)
    assert bodies(told.got) == bodies(told.sent)
    assert len(told.got) >= 3
    for line in told.got:
        assert line["times"] == 0
        assert (line["tag"], line["key"]) == ("tag", f"key-{len(line['body'])}")
        assert line.get("colour", "größer") == "größer"
    where_it_was_put(told)


def where_it_was_put(told: Told) -> None:
    """Queue and offset in the answer to a send are those of the message that arrives."""
    arrived = {line["body"]: line for line in told.got}
    for sent in told.sent:
        for place in ("queue", "offset"):
            if place in sent and place in arrived.get(sent["body"], {}):
                assert arrived[sent["body"]][place] == sent[place], sent["body"]


def all_eight(kind: str) -> Check:
    def check(told: Told) -> None:
        assert all(line["status"] == "ok" for line in told.sent)
        assert bodies(told.got) == Counter(f"{kind}-{number}" for number in range(MESSAGES))

    return check


def late(told: Told) -> None:
    assert all(line["status"] == "ok" for line in told.sent)
    assert bodies(told.got) == bodies(told.sent)
    assert len(told.got) == 3
    for line in told.got:
        assert 900 <= line["waited_ms"] < 10_000


def only_red_and_green(told: Told) -> None:
    assert [line["status"] for line in told.sent] == ["ok"] * 5
    assert bodies(told.got) == Counter(["tagged-red", "tagged-green"])


def only_what_the_expression_wants(told: Told) -> None:
    assert [line["status"] for line in told.sent] == ["ok"] * 7
    expected = ["sql-11/red/t", "sql-12/it's/t", "sql-null/red/vip"]
    assert bodies(told.got) == Counter(expected)


def told_where_it_is_bad(told: Told) -> None:
    [refused] = told.all("refused")
    assert refused["code"] == 23
    assert "at character 9" in refused["why"]


def in_order(told: Told) -> None:
    """Three orders of six steps, each in one queue and in its own sequence."""
    assert [line["status"] for line in told.sent] == ["ok"] * 18
    assert bodies(told.got) == bodies(told.sent)
    for order in "012":
        mine = [line for line in told.got if line["body"].startswith(f"{order}/")]
        assert [line["body"] for line in mine] == [f"{order}/{step}" for step in range(6)]
        assert len({line["queue"] for line in mine}) == 1


def in_order_with_a_pause(told: Told) -> None:
    """The same, but 1/2 was refused once: it comes again, before what follows it."""
    assert [line["status"] for line in told.sent] == ["ok"] * 18
    again = [line for line in told.got if line["body"] == "1/2"]
    assert [line["times"] for line in again] == [0, 1]
    told.lines.remove(again[0])
    in_order(told)


def to_both(told: Told) -> None:
    for by in "12":
        mine = [line for line in told.got if line["by"] == by]
        assert bodies(mine) == Counter(f"broadcast-{number}" for number in range(MESSAGES))


def shared(told: Told) -> None:
    assert [line["queues"] for line in told.all("assigned")] == [2, 2]
    assert bodies(told.got) == bodies(told.sent)
    assert len(told.sent) == 2 * MESSAGES
    assert {line["by"] for line in told.got} == {"1", "2"}
    owners = {(line["by"], line["queue"]) for line in told.got}
    assert len(owners) == QUEUES  # no queue has two readers


def resumed(told: Told) -> None:
    """The second consumer goes on where the first one stopped."""
    assert len(told.sent) == 2 * MESSAGES
    assert bodies(told.got) == bodies(told.sent)
    for line in told.got:
        assert line["body"].startswith(f"{line['by']}/")


def three_attempts(told: Told) -> None:
    tries = [(line["body"], line["times"]) for line in told.got]
    assert sorted(tries) == [("again", 0), ("again", 1), ("again", 2), ("fine", 0)]
    # A message from the retry topic is shown under the topic that it was sent to.
    assert len({line["topic"] for line in told.got}) == 1


def dead_after(attempts: int) -> Check:
    def check(told: Told) -> None:
        tries = [line["times"] for line in told.got if line["by"] == "1"]
        assert tries == list(range(attempts))
        [dead] = [line for line in told.got if line["by"] == "pull"]
        assert dead["body"] == "dead"
        assert (dead["tag"], dead["key"], dead["colour"]) == ("tag", "key-4", "größer")

    return check


def bad_is_dead_and_good_goes_on(told: Told) -> None:
    tries = [(line["body"], line["times"]) for line in told.got if line["by"] == "1"]
    assert tries == [("bad", 0), ("bad", 1), ("good", 0)]
    assert [line["body"] for line in told.got if line["by"] == "pull"] == ["bad"]


def pulled(told: Told) -> None:
    each_once(told)
    queues = told.all("queue")
    assert [line["begin"] for line in queues] == [line["first"] for line in queues] == [0] * QUEUES
    assert sum(line["end"] for line in queues) == MESSAGES
    assert [line["committed"] for line in queues] == [line["end"] for line in queues]
    ends = [line["end"] for line in queues]
    assert [line["next"] for line in told.all("beyond")] == ends
    assert {line["status"] for line in told.all("beyond")} == {"OFFSET_ILLEGAL"}
    [awaited] = told.all("awaited")
    assert awaited["status"] == "FOUND"
    assert awaited["ms"] < 5_000


def lite_pulled(told: Told) -> None:
    each_once(told)
    assert [line["body"] for line in told.got if line["by"] == "2"] == ["lite-later"]


def last_three(told: Told) -> None:
    assert [line["body"] for line in told.got] == [f"seek-{number}" for number in (5, 6, 7)]


def found(told: Told) -> None:
    ways = {f"key one-{GROUP}", f"key two-{GROUP}", "offset id", "unique key"}
    assert Counter(line["by"] for line in told.got) == Counter(ways)
    assert {line["body"] for line in told.got} == {"sought"}


def answered(told: Told) -> None:
    expected = [f"answer to question-{number}" for number in range(3)]
    assert [line["body"] for line in told.all("answered")] == expected
    assert [line["status"] for line in told.all("replied")] == ["ok"] * 3


# --- transactions --------------------------------------------------------------------------------
# A body begins with a plan: what the local transaction says, then the answers to the checks.


def exactly_the_committed(told: Told) -> None:
    """Every committed message once, no other; nobody is asked more often than he leaves open."""
    assert all(line["status"] == "ok" for line in told.sent)
    plans = {line["body"]: line["body"].partition("/")[0].split(",") for line in told.sent}
    assert len(plans) == len(told.sent) > 0
    assert Counter(line["body"] for line in told.all("local")) == Counter(list(plans))
    committed = [body for body, plan in plans.items() if plan[-1] == "commit"]
    assert bodies(told.got) == Counter(committed)
    for line in told.got:
        assert (line["times"], line["tag"], line["colour"]) == (0, "tag", "größer")
    for body, plan in plans.items():
        asked = [line for line in told.all("asked") if line["body"] == body]
        assert [line["times"] for line in asked] == [str(n) for n in range(1, len(plan))], body
        for line in asked:
            assert (line["topic"], line["tag"], line["colour"]) == ("orders", "tag", "größer")
            assert line["key"] == f"key-{len(body)}"


def slow_but_once(told: Told) -> None:
    """Commit by the check, then by the transaction itself, or only by that; or neither of them."""
    assert bodies(told.got) == Counter(["unknown/slow", "commit/slow"])
    assert bodies(told.all("asked")) == Counter(
        f"{p}/slow" for p in ("unknown", "commit", "rollback")
    )


def whoever_sent_is_asked(told: Told) -> None:
    """Or somebody else of the group, if that one has left."""
    exactly_the_committed(told)
    assert len(told.all("asked")) == 3 * MESSAGES
    for line in told.all("asked"):
        sender = line["body"].split("/")[1]
        assert line["by"] in ({"1", "2"} if sender == "heirs" else {sender})


def not_before_its_time(told: Told) -> None:
    exactly_the_committed(told)
    waited = {line["body"].split("/")[1]: line["waited_ms"] for line in told.all("asked")}
    usual = SETTINGS["transactionTimeOut"]
    for seconds, least_ms in (("5", 5_000), ("1", 1_000), ("-1", usual), ("soon", usual)):
        assert waited[seconds] >= least_ms
    assert waited["1"] < waited["-1"]  # shorter than usual is honoured too
    assert "within" not in waited


# --- the table -----------------------------------------------------------------------------------

ORDINARY: dict[str, Check] = {
    "sync": each_once,
    "autocreate": each_once,
    "async": each_once,
    "oneway": all_eight("oneway"),
    "batch": all_eight("batch"),
    "big": each_once,
    "delay": late,
    "tags": only_red_and_green,
    "orderly": in_order,
    "broadcast": all_eight("broadcast"),
    "retry": three_attempts,
    "pull": each_once,
}
JAVA: dict[str, Check] = {
    **ORDINARY,
    "orderly": in_order_with_a_pause,
    "orderly-dlq": bad_is_dead_and_good_goes_on,
    "broadcast": to_both,
    "rebalance": shared,
    "resume": resumed,
    "dlq": dead_after(2),
    "dlq-at-once": dead_after(1),
    "pull": pulled,
    "litepull": lite_pulled,
    "sql": only_what_the_expression_wants,
    "sql-refused": told_where_it_is_bad,
    "liteassign": last_three,
    "query": found,
    "reply": answered,
    "transaction": exactly_the_committed,
    "transaction-check": exactly_the_committed,
    "transaction-slow": slow_but_once,
    "transaction-group": whoever_sent_is_asked,
    "transaction-immunity": not_before_its_time,
}
TRANSACTIONS = {name: JAVA[name] for name in ("transaction", "transaction-check")}


def some(*names: str) -> dict[str, Check]:
    return {name: ORDINARY[name] for name in names}


TABLE: dict[str, dict[str, Check]] = {
    "java-5.5.0": {**JAVA, "timed": late},  # a delay of any length: 4.9 has only levels
    "java-4.9.7": JAVA,
    "A": some(
        "sync", "autocreate", "oneway", "big", "delay", "tags", "orderly", "broadcast", "retry"
    )
    | TRANSACTIONS
    | {"transaction-slow": slow_but_once},
    "B": ORDINARY,
    "C": some("sync", "autocreate", "big", "tags", "retry"),
    "D": {**some("sync", "big", "delay", "tags", "broadcast", "retry"), "sharded": in_order},
    "spring-2.3.5": some("sync", "tags", "orderly", "retry") | TRANSACTIONS,
    "go-2.1.2": some("sync", "autocreate", "tags", "orderly", "retry") | TRANSACTIONS,
}
QUICK = {  # the rest is for `make interop`
    ("java-5.5.0", "sync"),
    ("java-5.5.0", "transaction-check"),
    ("A", "transaction"),
    ("B", "sync"),
    ("B", "batch"),
}


def cells() -> Iterator[Any]:
    for client, scenarios in TABLE.items():
        for scenario, check in scenarios.items():
            marks = [pytest.mark.slow]
            if client.startswith(("java", "spring")):
                marks.append(pytest.mark.apache)
            if (client, scenario) not in QUICK:
                marks.append(pytest.mark.nightly)
            yield pytest.param(client, scenario, check, id=f"{client}-{scenario}", marks=marks)


@pytest.mark.parametrize(("client", "scenario", "check"), list(cells()))
def test_a_client_gets_what_was_sent(
    client: str, scenario: str, check: Check, tmp_path: Path
) -> None:
    with EscrowMQ(tmp_path / "ours", SETTINGS) as ours:
        if scenario != "autocreate":
            ours.create_topic("orders", queues=QUEUES)
        try:
            told = play(
                client,
                scenario,
                namesrv=ours.namesrv_address,
                topic="orders",
                group=GROUP,
                directory=tmp_path / "client",
            )
        except Unavailable as reason:
            pytest.skip(f"client {client}: {reason}")
        shown = f"\n{told}\nour log:\n{ours.log_tail()}"
        assert not told.all("failed"), shown
        assert told.all("done"), shown
        try:
            check(told)
        except AssertionError as error:
            error.add_note(shown)
            raise
