"""Criteria, export and pace of dead letters, and brokers that fail while they are resent."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.admin.dead_letters import (
    DeadLetter,
    DeadLetterCriteria,
    DeadLetterState,
    ResendStatus,
    dead_letter_json,
    dead_letter_queues,
    find_dead_letters,
    parse_dead_letter,
    resend_dead_letters,
)
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import ManualClock
from escrowmq.message.keys import encode_host, encode_offset_id
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import OffsetResponse, PullMessageResponse, SendMessageResponse
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_broker import ScriptedBroker

HOST = encode_host("127.0.0.1", 10911)
TOPIC = "%DLQ%g"


def make_letter(number: int = 0, *, broker: str = "a", **changes: Any) -> DeadLetter:
    properties = {"RETRY_TOPIC": "orders", "UNIQ_KEY": f"U{number}", "KEYS": "k1 k2"}
    properties |= {"ESCROW_CAUSE_TIME": "7", "ESCROW_CAUSE_TYPE": "app.Bad"}
    fields: dict[str, Any] = {
        "topic": TOPIC,
        "body": b"body",
        "keys": "k1 k2",
        "tags": "",
        "properties": properties,
        "message_id": f"U{number}",
        "offset_id": encode_offset_id(HOST, 100 + number),
        "queue_id": 0,
        "queue_offset": number,
        "born_ms": 1,
        "stored_ms": 10,
        "reconsume_times": 3,
        "flag": 0,
        "log_offset": 100 + number,
        "broker": broker,
    }
    return DeadLetter(ReceivedMessage(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("criteria", "is_match"),
    [
        ({}, True),
        ({"groups": ["g", "h"]}, True),
        ({"groups": ["h"]}, False),
        ({"topic": "orders"}, True),
        ({"topic": TOPIC}, False),
        ({"error_type": "app.Bad"}, True),
        ({"error_type": "Bad"}, True),
        ({"error_type": "ad"}, False),
        ({"key": "k2"}, True),
        ({"key": "U0"}, True),
        ({"key": "k"}, False),
        ({"since_ms": 10, "until_ms": 10}, True),
        ({"since_ms": 11}, False),
        ({"until_ms": 9}, False),
        ({"attempts_min": 3}, True),
        ({"attempts_min": 4}, False),
        ({"states": [DeadLetterState.PURGED]}, False),
    ],
)
def test_every_criterion_must_be_met(criteria: dict[str, Any], is_match: bool) -> None:
    assert DeadLetterCriteria(**criteria).matches(make_letter()) is is_match


names = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)


@given(body=st.binary(max_size=50), properties=st.dictionaries(names, names, max_size=4))
def test_an_exported_dead_letter_is_read_back_as_it_was(
    body: bytes, properties: dict[str, str]
) -> None:
    letter = make_letter(body=body, properties=properties, keys=properties.get("KEYS", ""))
    parsed = parse_dead_letter(json.loads(json.dumps(dead_letter_json(letter))))
    assert parsed.message.body == body
    assert parsed.message.properties == properties
    assert (parsed.group, parsed.state) == (letter.group, letter.state)
    assert parsed.message.log_offset == letter.message.log_offset


@pytest.mark.parametrize(
    "change",
    [
        {"id": "no id"},
        {"properties": {"a": "b\x01c"}},
        {"properties": None},
        {"state": "alive"},
        {"body": None},
        {"body": None, "body_base64": "?"},
        {"queue": "one"},
    ],
)
def test_a_line_that_is_no_dead_letter_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_dead_letter({**dead_letter_json(make_letter()), **change})
    with pytest.raises(ValueError, match="this is no exported dead letter"):
        parse_dead_letter({})


# --- resend --------------------------------------------------------------------------------------


def accept_send(request: Request[Any]) -> bytes:
    return encode_response(request, SendMessageResponse(msg_id="copy", queue_id=0, queue_offset=0))


def nothing_found(request: Request[Any]) -> bytes:
    return encode_response(request, code=ResponseCode.QUERY_NOT_FOUND, remark="none")


def sends(broker: ScriptedBroker) -> list[Request[Any]]:
    return [r for r in broker.requests if r.head.code == RequestCode.SEND_MESSAGE_V2]


def test_a_copy_keeps_what_belongs_to_the_message_and_nothing_of_its_history() -> None:
    kept = {"KEYS": "k", "color": "red", "ORIGIN_MESSAGE_ID": "first", "UNIQ_KEY": "U"}
    removed = {
        "DELAY": "3",
        "TIMER_DELIVER_MS": "7",
        "TIMER_DELAY_SEC": "1",
        "TIMER_DELAY_MS": "1",
        "TRAN_MSG": "true",
        "ESCROW_RETRY_OF": "17",
        "DLQ_ORIGIN_MESSAGE_ID": "U",
        "ESCROW_CAUSE_TIME": "1",
        "DLQ_CAUSE_TYPE": "Bad",
        "DLQ_RESENT_FROM": "earlier",
        "RETRY_TOPIC": "orders",
        "DLQ_ORIGIN_TOPIC": "orders",
    }
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = nothing_found
        broker.responses[RequestCode.SEND_MESSAGE_V2] = accept_send
        letter = make_letter(properties=kept | removed, broker=broker.address, flag=7, born_ms=5)
        list(resend_dead_letters(cluster, [letter]))
        [request] = sends(broker)
    fields = request.head.fields
    own = {"RETRY_TOPIC": "orders", "DLQ_RESENT_FROM": letter.message.offset_id}
    assert decode_properties(fields.properties.encode()) == kept | own
    assert (fields.topic, fields.reconsume_times) == ("%RETRY%g", 0)
    assert (fields.flag, fields.born_timestamp, fields.sys_flag) == (7, 5, 0)


def test_a_copy_of_a_message_without_a_unique_key_is_found_by_the_id_of_the_dead_letter() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = nothing_found
        broker.responses[RequestCode.SEND_MESSAGE_V2] = accept_send
        letter = make_letter(properties={"RETRY_TOPIC": "orders"}, broker=broker.address)
        list(resend_dead_letters(cluster, [letter]))
        [send] = sends(broker)
        [query] = [r for r in broker.requests if r.head.code == RequestCode.QUERY_MESSAGE]
    properties = decode_properties(send.head.fields.properties.encode())
    assert properties["UNIQ_KEY"] == query.head.fields.key == letter.message.offset_id


def test_a_cursor_behind_the_end_of_a_new_queue_does_not_count() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.serve_topic(TOPIC, (2, 5))
        [address] = cluster.brokers()
        connection = cluster.connection(address.address)
        for committed, cursor in ((0, 2), (3, 3), (5, 5), (6, 2)):
            header = OffsetResponse(offset=committed)
            broker.responses[RequestCode.QUERY_CONSUMER_OFFSET] = partial(
                encode_response, fields=header
            )
            [queue] = dead_letter_queues(connection, ["g"])
            assert queue.cursor == cursor
        broker.responses[RequestCode.QUERY_CONSUMER_OFFSET] = nothing_found
        [queue] = dead_letter_queues(connection, ["g"])
        assert queue.cursor == 2


def test_dead_letters_are_resent_at_the_rate() -> None:
    clock, waits = ManualClock(), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock.advance(ms=round(seconds * 1000))

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = nothing_found
        broker.responses[RequestCode.SEND_MESSAGE_V2] = accept_send
        letters = [make_letter(number, broker=broker.address) for number in range(5)]
        results = resend_dead_letters(cluster, letters, rate=2, clock=clock, wait=wait)
        assert [result.detail for result in results] == ["copy"] * 5
    assert waits == [0.5] * 4


def test_a_broker_that_fails_is_not_tried_again() -> None:
    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = nothing_found
        broker.responses[RequestCode.SEND_MESSAGE_V2] = lambda request: None  # closes
        letters = [make_letter(number, broker=broker.address) for number in range(3)]
        results = list(resend_dead_letters(cluster, [*letters, make_letter(broker="gone")]))
        assert {result.status for result in results} == {ResendStatus.FAILED}
        assert "closed the connection" in results[2].detail
        assert "there is no broker gone" in results[3].detail
        assert len(sends(broker)) == 1


def test_a_dead_letter_that_a_broker_refuses_does_not_stop_the_others() -> None:
    def respond(request: Request[Any]) -> bytes:
        if "U1" in request.head.fields.properties:
            return encode_response(request, code=ResponseCode.SYSTEM_BUSY, remark="busy")
        return accept_send(request)

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.responses[RequestCode.QUERY_MESSAGE] = nothing_found
        broker.responses[RequestCode.SEND_MESSAGE_V2] = respond
        letters = [make_letter(number, broker=broker.address) for number in range(3)]
        results = [(r.status, r.detail) for r in resend_dead_letters(cluster, letters)]
        assert results == [
            (ResendStatus.RESENT, "copy"),
            (ResendStatus.FAILED, "busy"),
            (ResendStatus.RESENT, "copy"),
        ]


# --- find ----------------------------------------------------------------------------------------


def test_a_body_that_cannot_be_decompressed_is_reported_and_the_others_are_found() -> None:
    def pull(request: Request[Any]) -> bytes:
        properties = encode_properties({"RETRY_TOPIC": "orders", "UNIQ_KEY": "U"})
        records = [
            encode_record(
                NewRecord(TOPIC, 0, b"x", properties=properties, born_host=HOST, sys_flag=flag),
                *(number, 100 + number, 1, HOST),
            )
            for number, flag in enumerate([0, 1, 0])  # 1: compressed
        ]
        header = PullMessageResponse(
            next_begin_offset=3, min_offset=0, max_offset=3, suggest_which_broker_id=0
        )
        return encode_response(request, header, body=b"".join(records))

    with ScriptedBroker() as broker, broker.cluster() as cluster:
        broker.serve_topic(TOPIC, (0, 3))
        broker.responses |= {
            RequestCode.QUERY_CONSUMER_OFFSET: lambda request: encode_response(
                request, OffsetResponse(offset=0)
            ),
            RequestCode.PULL_MESSAGE: pull,
            RequestCode.QUERY_MESSAGE: nothing_found,
        }
        letters = list(find_dead_letters(cluster, DeadLetterCriteria(groups=["g"])))
        assert [letter.message.queue_offset for letter in letters] == [0, 2]
        assert len(cluster.failures) == 1
