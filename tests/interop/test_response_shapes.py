"""Every key of our responses, headers and bodies, compared with what Apache RocketMQ sends.

The same conversation was captured from Apache RocketMQ (`fixtures/*/shapes.json`) and runs here
against our broker and name server. Whatever differs must be in DIFFERENCES, with its reason.
Where the two releases differ from each other, one of them is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop import fixtures
from tests.interop.conversation import SETTINGS, Conversation, capture
from tests.interop.shapes import Shape
from tests.support.brokers import Server

NEW, OLD = "5.5.0", "4.9.7"

SUCCESS_REMARK = "RocketMQ sends a remark with a success, such as `not set any response code`"
STATIC_TOPICS = "there are no static topics"
KEY_OF_ORDINARY_SENDS = "omitted for ordinary sends, as in 4.9"
REGION_IN_ERRORS = "clients read region and trace switch of a successful send only"
OFFSETS_IN_REFUSALS = "C++ clients need the four offsets in every response to a pull"
BAD_EXPRESSION = "RocketMQ ignores an invalid expression in a pull and returns every message"
FOR_SLAVES = "a request of slaves, which are not served"
OUTCOME = "the outcome of the transaction, an extension"
DERIVED = "the same time again as local text; RocketMQ's tools do not read it"
DIFFERENCES = {
    ("UPDATE_AND_CREATE_TOPIC", "remark"): SUCCESS_REMARK,
    ("END_TRANSACTION, rollback", "remark"): SUCCESS_REMARK,
    ("QUERY_CONSUME_QUEUE", "remark"): SUCCESS_REMARK,
    ("GET_BROKER_MEMBER_GROUP", "remark"): SUCCESS_REMARK,
    ("GET_ALL_TOPIC_CONFIG", "body.mappingDataVersion"): STATIC_TOPICS,
    ("GET_ALL_TOPIC_CONFIG", "body.topicQueueMappingDetailMap"): STATIC_TOPICS,
    ("GET_ALL_TOPIC_CONFIG", "body.topicQueueMappingInfoMap"): STATIC_TOPICS,
    ("SEND_MESSAGE", "extFields.transactionId"): KEY_OF_ORDINARY_SENDS,
    ("SEND_MESSAGE, retry of a new group", "extFields.transactionId"): KEY_OF_ORDINARY_SENDS,
    ("SEND_MESSAGE_V2", "extFields.transactionId"): KEY_OF_ORDINARY_SENDS,
    ("SEND_MESSAGE_V2, delayed", "extFields.transactionId"): KEY_OF_ORDINARY_SENDS,
    ("SEND_MESSAGE, unknown topic", "extFields"): REGION_IN_ERRORS,
    ("SEND_MESSAGE, no such queue", "extFields"): REGION_IN_ERRORS,
    ("SEND_BATCH_MESSAGE, delayed", "extFields"): REGION_IN_ERRORS,
    ("SEND_REPLY_MESSAGE, requester gone", "extFields"): REGION_IN_ERRORS,
    ("PULL_MESSAGE, unknown topic", "extFields"): OFFSETS_IN_REFUSALS,
    ("PULL_MESSAGE, no such queue", "extFields"): OFFSETS_IN_REFUSALS,
    ("PULL_MESSAGE, no subscription", "extFields"): OFFSETS_IN_REFUSALS,
    ("PULL_MESSAGE, bad expression", "code"): BAD_EXPRESSION,
    ("PULL_MESSAGE, bad expression", "body"): BAD_EXPRESSION,
    ("PULL_MESSAGE, bad expression", "extFields.topicSysFlag"): BAD_EXPRESSION,
    ("PULL_MESSAGE, bad expression", "extFields.groupSysFlag"): BAD_EXPRESSION,
    ("GET_ALL_CONSUMER_OFFSET", "code"): FOR_SLAVES,
    ("GET_ALL_CONSUMER_OFFSET", "body"): FOR_SLAVES,
    ("GET_ALL_CONSUMER_OFFSET", "remark"): FOR_SLAVES,
    ("END_TRANSACTION, commit", "extFields"): OUTCOME,
    ("END_TRANSACTION, rollback", "extFields"): OUTCOME,
    ("QUERY_CONSUME_TIME_SPAN", "body.consumeTimeSpanSet[].consumeTimeStampStr"): DERIVED,
    ("QUERY_CONSUME_TIME_SPAN", "body.consumeTimeSpanSet[].minTimeStampStr"): DERIVED,
    ("QUERY_CONSUME_TIME_SPAN", "body.consumeTimeSpanSet[].maxTimeStampStr"): DERIVED,
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shape]:
    conf = {name: str(value).lower() for name, value in SETTINGS.items()}
    with Server(tmp_path_factory.mktemp("shapes"), conf=conf) as served:
        return Conversation(served.address, served.namesrv_address).run()


def differing_paths(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two shapes differ. A missing key is one path, not its content."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            inner = f"{path}.{key}" if path else key
            if key in theirs and key in ours:
                yield from differing_paths(theirs[key], ours[key], inner)
            else:
                yield inner
    elif isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        yield from differing_paths(theirs[0], ours[0], f"{path}[]")
    elif theirs != ours:
        yield path


def differences(version: str, ours: dict[str, Shape]) -> set[tuple[str, str]]:
    return {
        (name, path)
        for name, theirs in fixtures.shapes(version).items()
        for path in differing_paths(theirs, ours[name])
    }


@pytest.mark.slow
def test_our_responses_have_the_keys_that_rocketmq_5_sends(ours: dict[str, Shape]) -> None:
    assert ours.keys() == fixtures.shapes(NEW).keys()
    assert differences(NEW, ours) == DIFFERENCES.keys()


@pytest.mark.slow
def test_where_rocketmq_4_sends_other_keys_ours_are_those_of_5(ours: dict[str, Shape]) -> None:
    between_releases = differences(OLD, fixtures.shapes(NEW))
    assert differences(OLD, ours) <= between_releases | DIFFERENCES.keys()


@pytest.mark.slow
@pytest.mark.apache
@pytest.mark.nightly
def test_the_captured_shapes_are_those_of_a_running_rocketmq(version: str, tmp_path: Path) -> None:
    assert capture(version, tmp_path) == fixtures.shapes(version)


def test_every_captured_json_header_names_its_serializer() -> None:
    for version in fixtures.VERSIONS:
        for name, shape in fixtures.shapes(version).items():
            assert shape["header"]["serializeTypeCurrentRPC"] == "JSON", (version, name)
