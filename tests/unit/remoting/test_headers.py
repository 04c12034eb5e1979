"""Headers as clients send them, and the errors for missing and invalid fields."""

from __future__ import annotations

import pytest

from escrowmq.errors import InvalidField, UnknownRequest
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.headers import (
    EndTransaction,
    Header,
    NoFields,
    OffsetResponse,
    QueryMessage,
    SendMessage,
    SendMessageResponse,
    SendMessageV2,
    TimestampResponse,
    UnregisterClient,
    decode_header,
    encode_header,
    request,
)
from escrowmq.remoting.requests import REQUESTS, header_types

LONG_NAMES = {
    "producerGroup": "group",
    "topic": "orders",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "3",
    "sysFlag": "4",
    "bornTimestamp": "1700000000000",
    "flag": "0",
    "properties": "TRAN_MSG\x01true\x02",
    "reconsumeTimes": "0",
    "unitMode": "false",
    "maxReconsumeTimes": "16",
    "batch": "true",
    "bname": "broker-a",
}


def test_short_names_mean_the_same_as_long_ones() -> None:
    short = dict(zip("abcdefghijklmn", LONG_NAMES.values(), strict=True))
    version1, version2 = decode_header(SendMessage, LONG_NAMES), decode_header(SendMessageV2, short)
    assert isinstance(version2, SendMessage)
    for name in SendMessage.__struct_fields__:
        assert getattr(version1, name) == getattr(version2, name), name
    assert encode_header(version1) == LONG_NAMES
    assert encode_header(version2) == short


def test_the_digit_1_of_a_cpp_client_means_true() -> None:
    end = decode_header(
        EndTransaction,
        {
            "producerGroup": "group",
            "tranStateTableOffset": "7",
            "commitLogOffset": "4096",
            "commitOrRollback": "8",
            "fromTransactionCheck": "1",
            "msgId": "7F00000100002A9F00000000075BCD15",
            "transactionId": "",
        },
    )
    assert end.from_transaction_check is True
    assert (end.tran_state_table_offset, end.commit_log_offset) == (7, 4096)


def test_booleans_are_encoded_as_words_and_none_is_omitted() -> None:
    header = SendMessageResponse(msg_id="A", queue_id=1, queue_offset=2, trace_on=True)
    assert encode_header(header) == {
        "msgId": "A",
        "queueId": "1",
        "queueOffset": "2",
        "TRACE_ON": "true",
    }


def test_names_that_are_not_camel_case_are_decoded() -> None:
    assert decode_header(UnregisterClient, {"clientID": "c"}).client_id == "c"
    query = {"topic": "t", "key": "k", "maxNum": "1", "beginTimestamp": "0", "endTimestamp": "1"}
    assert decode_header(QueryMessage, query | {"_UNIQUE_KEY_QUERY": "true"}).is_unique_key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("queueId", "x"),
        ("queueId", ""),
        ("queueId", "1.5"),
        ("queueId", "2147483648"),
        ("bornTimestamp", "9223372036854775808"),
        ("batch", "yes"),
        ("batch", "2"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(field: str, value: str) -> None:
    with pytest.raises(InvalidField, match=field) as refused:
        decode_header(SendMessage, LONG_NAMES | {field: value})
    assert refused.value.code == ResponseCode.SYSTEM_ERROR
    assert "SendMessage" in refused.value.remark


@pytest.mark.parametrize("field", ["producerGroup", "topic", "queueId"])
def test_a_missing_field_is_named_in_the_error(field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        decode_header(
            SendMessage, {name: text for name, text in LONG_NAMES.items() if name != field}
        )


# These have only names for log lines; the project neither handles nor sends them.
NOT_SUPPORTED = {
    RequestCode.RECALL_MESSAGE,
    RequestCode.QUERY_ASSIGNMENT,
    RequestCode.SET_MESSAGE_REQUEST_MODE,
    RequestCode.POP_MESSAGE,
    RequestCode.ACK_MESSAGE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
    RequestCode.NOTIFICATION,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
}


def test_every_supported_request_code_has_its_headers() -> None:
    assert set(REQUESTS) == set(RequestCode) - NOT_SUPPORTED
    for types in REQUESTS.values():
        assert issubclass(types.request, Header)
        assert issubclass(types.response, Header)
    assert header_types(RequestCode.HEART_BEAT).request is NoFields
    assert header_types(RequestCode.GET_MIN_OFFSET).response is OffsetResponse
    assert header_types(RequestCode.GET_EARLIEST_MSG_STORETIME).response is TimestampResponse


def test_a_request_code_cannot_have_two_headers() -> None:
    with pytest.raises(ValueError, match="HEART_BEAT already has the header"):
        request(RequestCode.HEART_BEAT)(EndTransaction)
    assert header_types(RequestCode.HEART_BEAT).request is NoFields


def test_an_unknown_request_is_refused_with_code_3() -> None:
    with pytest.raises(UnknownRequest, match="98765") as refused:
        header_types(98765)
    assert refused.value.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_request_codes_have_names_for_log_lines() -> None:
    assert request_name(37) == "END_TRANSACTION"
    assert request_name(98765) == "request code 98765"
