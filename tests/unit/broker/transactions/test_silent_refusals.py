"""A refusal tells nothing about a half of somebody else: no position, topic, group or state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.auth.acl import parse_rules
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.dispatch import RequestPermissions
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, NoFields, ViewMessage
from escrowmq.remoting.requests import Request
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, new_request
from tests.support.escrows import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    end_many_request,
    end_request,
    half_request,
)

SECRETS = ("secret-topic", "secret-group", "committed", "rolled_back", "stranded")
RULES = """
accounts:
- accessKey: stranger
  secretKey: a-long-random-text
  topicPerms: [T=PUB|SUB]
  groupPerms: [own-group=PUB|SUB]
"""


def bench_with_half(*, is_decided: bool) -> tuple[EscrowBench, HalfPosition]:
    bench = EscrowBench()
    for number in range(3):  # offsets that the request does not name
        bench.park(f"other {number}", topic="secret-topic", group="secret-group")
    half = bench.park("k", topic="secret-topic", group="secret-group")
    if is_decided:
        assert bench.end(half, ROLLBACK, group="secret-group").code == 0
    return bench, half


def assert_tells_nothing(response: Response, half: HalfPosition, *claimed: object) -> None:
    assert response.code != 0
    assert not response.ext_fields
    texts = {*SECRETS, str(half.log_offset), str(half.queue_offset)} - set(map(str, claimed))
    for text in texts:
        assert text not in response.remark.split(), response.remark
        assert not text.isalpha() or text not in response.remark


@pytest.mark.parametrize("is_decided", [False, True], ids=["open", "decided"])
@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK, UNKNOWN])
@pytest.mark.parametrize("check", [False, True], ids=["end", "answer"])
@pytest.mark.parametrize("claim", ["another group", "another log offset", "another half"])
def test_a_wrong_claim_tells_nothing(
    claim: str, check: bool, verdict: int, is_decided: bool
) -> None:
    bench, half = bench_with_half(is_decided=is_decided)
    position, group = half, "secret-group"
    if claim == "another group":
        group = "p"
    elif claim == "another log offset":
        position = half._replace(log_offset=7)
    else:
        position = half._replace(queue_offset=half.queue_offset - 1)
    response = bench.end(position, verdict, group=group, check=check)
    assert_tells_nothing(response, half, *position, group)
    missing = bench.end((99, 98), verdict, group=group, check=check)
    expected = missing.remark.replace("99", str(position[0])).replace("98", str(position[1]))
    assert (response.code, response.remark) == (missing.code, expected)


@pytest.mark.parametrize("is_decided", [False, True], ids=["open", "decided"])
def test_a_wrong_claim_about_one_of_many_tells_nothing(is_decided: bool) -> None:
    bench, half = bench_with_half(is_decided=is_decided)
    for position, group in ((half, "p"), (half._replace(log_offset=7), "secret-group")):
        response = bench.request(end_many_request([position], COMMIT, group=group))
        assert_tells_nothing(response, half, *position, group)


# --- with access control -------------------------------------------------------------------------


class StrangersBroker:
    """The access check of a broker, for an account that may only use topic T."""

    def __init__(self, bench: EscrowBench) -> None:
        self._rules = parse_rules(RULES)
        self._broker = bench.broker
        self._permissions = RequestPermissions(bench.store, bench.coordinator, cluster="C")
        self._handlers = {handler.code: handler for handler in bench.broker.handlers()}

    def refusal(self, request: Request[Any]) -> str:
        """Return the remark of a refusal; an empty text if the request is allowed."""
        account = self._rules.accounts["stranger"]
        handler = self._handlers[request.head.code]
        validator = AccessValidator(self._rules)
        for permission in handler.permission(self._permissions, request):
            try:
                # The check after the signature, which is not what is tested here.
                validator._require(account, permission, "127.0.0.1")
            except Exception as refusal:
                return str(refusal)
        return ""


@pytest.mark.parametrize("is_decided", [False, True], ids=["open", "decided"])
def test_an_account_without_permission_learns_nothing(is_decided: bool) -> None:
    bench, half = bench_with_half(is_decided=is_decided)
    stranger = StrangersBroker(bench)
    requests = [
        *(end_request(half, verdict, group="secret-group") for verdict in (COMMIT, UNKNOWN)),
        end_many_request([half], ROLLBACK, group="secret-group"),
        new_request(RequestCode.VIEW_MESSAGE_BY_ID, ViewMessage(offset=half.log_offset)),
        new_request(
            RequestCode.CONSUMER_SEND_MSG_BACK,
            ConsumerSendMessageBack(offset=half.log_offset, group="own-group", delay_level=0),
        ),
    ]
    for request in requests:
        remark = stranger.refusal(request)
        assert remark, "it is allowed"
        for text in (*SECRETS, "cluster"):
            assert text not in remark


def test_a_half_needs_the_permission_of_the_writer_it_names() -> None:
    bench, _ = bench_with_half(is_decided=False)
    stranger = StrangersBroker(bench)
    attempt = {"ESCROW_BATCH": "0", "ESCROW_ATTEMPT": "a"}
    assert not stranger.refusal(half_request("k", ESCROW_WRITER="own-group", **attempt))
    for writer in ("others-writer", "own-group\x02ESCROW_WRITER\x01others-writer"):
        request = half_request("k", **attempt)
        fields = request.head.fields
        text = f"{fields.properties}ESCROW_WRITER\x01{writer}\x02"
        forged = new_request(
            RequestCode.SEND_MESSAGE,
            type(fields)(producer_group="p", topic="T", queue_id=0, properties=text),
        )
        assert "others-writer" in stranger.refusal(forged)


# --- names that would break a line ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1b[2J", "a\u2028b", "a\x85b", "a\0"])
def test_names_with_control_characters_are_refused(name: str) -> None:
    bench = EscrowBench()
    assert bench.request(half_request("k", group=name)).code == 13
    assert bench.request(half_request(name)).code == 13
    assert (
        bench.request(half_request(name, TAGS="a", CHECK_IMMUNITY_TIME_IN_SECONDS="5")).code == 13
    )
    channel = FakeChannel("127.0.0.1:40001")
    for body in (
        {"clientID": name},
        {"clientID": "c", "producerDataSet": [{"groupName": name}]},
        {"clientID": "c", "consumerDataSet": [{"groupName": name}]},
    ):
        request = heartbeat_with(body)
        assert bench.request(request, channel).code == 29
    assert len(bench.coordinator.halves) == 0
    assert bench.broker.producers.names() == bench.broker.consumers.names() == []


def heartbeat_with(body: dict[str, Any]) -> Request[Any]:
    return new_request(RequestCode.HEART_BEAT, NoFields(), json.dumps(body).encode())


@pytest.mark.parametrize("name", ["grüße", "a b", "中文", "a\u00a0b", "a/b:c"])
def test_other_names_are_accepted(name: str) -> None:
    bench = EscrowBench()
    assert bench.request(half_request(name, group=name)).code == 0
