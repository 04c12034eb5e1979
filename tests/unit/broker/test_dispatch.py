"""The table of handlers, the permissions beside them, and the response codes of errors."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from escrowmq.broker.broker import Broker
from escrowmq.broker.dispatch import (
    RESPONSE_CODES,
    Handler,
    RequestPermissions,
    respond_error,
    response_code,
)
from escrowmq.config import Config
from escrowmq.errors import (
    CorruptRecord,
    EscrowError,
    FlushTimeout,
    RequestRefused,
    StoreError,
    StoreFailed,
    StoreFull,
    TransactionConflict,
    TransactionNotFound,
)
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import REQUESTS
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import FakeChannel, pull_request, send_request
from tests.support.stores import HOST, open_store

# Requests that a client sends in normal operation. All others are for administrators.
CLIENT_REQUESTS = {
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.PULL_MESSAGE,
    RequestCode.LITE_PULL_MESSAGE,
    RequestCode.CONSUMER_SEND_MSG_BACK,
    RequestCode.END_TRANSACTION,
    RequestCode.END_TRANSACTIONS,
    RequestCode.REGISTER_WRITER,
    RequestCode.DECIDE_BATCH,
    RequestCode.QUERY_WRITER,
    RequestCode.HEART_BEAT,
    RequestCode.UNREGISTER_CLIENT,
    RequestCode.CHECK_CLIENT_CONFIG,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP,
    RequestCode.LOCK_BATCH_MQ,
    RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.UPDATE_CONSUMER_OFFSET,
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
    RequestCode.QUERY_MESSAGE,
    RequestCode.VIEW_MESSAGE_BY_ID,
    # These have their own permission, which an administrator can grant.
    RequestCode.LIST_TRANSACTIONS,
    RequestCode.SHOW_TRANSACTION,
    RequestCode.TRANSACTION_CURSORS,
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.DELETE_TOPIC_IN_BROKER,
}


@pytest.fixture(scope="module")
def handlers() -> list[Handler]:
    disk = MemoryDisk()
    keys = UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2)
    return Broker(disk, open_store(disk), Config(), keys, store_host=HOST).handlers()


def test_no_request_code_has_two_handlers(handlers: list[Handler]) -> None:
    counts = Counter(handler.code for handler in handlers)
    assert [code for code, count in counts.items() if count > 1] == []


def test_every_handler_has_a_header_type(handlers: list[Handler]) -> None:
    assert [handler.code for handler in handlers if handler.code not in REQUESTS] == []


def test_every_handler_has_a_permission(handlers: list[Handler]) -> None:
    rules = {rule for rule in vars(RequestPermissions).values() if callable(rule)}
    assert all(handler.permission in rules for handler in handlers)


def test_requests_that_are_not_for_clients_are_for_administrators(handlers: list[Handler]) -> None:
    client_codes = {
        handler.code
        for handler in handlers
        if handler.permission is not RequestPermissions.administrator
    }
    assert client_codes == CLIENT_REQUESTS


def test_everything_that_stores_a_message_of_a_client_is_flow_controlled(
    handlers: list[Handler],
) -> None:
    limited_codes = {handler.code for handler in handlers if handler.is_flow_controlled}
    assert limited_codes == {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.CONSUMER_SEND_MSG_BACK,
    }


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestRefused(ResponseCode.NO_PERMISSION, "no"), ResponseCode.NO_PERMISSION),
        (StoreFull("full"), ResponseCode.SERVICE_NOT_AVAILABLE),
        (FlushTimeout("late"), ResponseCode.FLUSH_DISK_TIMEOUT),
        (StoreFailed("broken"), ResponseCode.SYSTEM_ERROR),
        (CorruptRecord(1, "bad CRC"), ResponseCode.SYSTEM_ERROR),
        (TransactionNotFound("gone"), ResponseCode.QUERY_NOT_FOUND),
        (TransactionConflict("no", "committed"), ResponseCode.TRANSACTION_CONFLICT),
        (EscrowError("no code"), None),
        (KeyError("a bug"), None),
    ],
)
def test_the_closest_base_class_gives_the_code(error: Exception, code: int | None) -> None:
    assert response_code(error) == code


def test_a_handler_may_override_the_code_also_by_a_base_class() -> None:
    overrides: dict[type[EscrowError], int] = {StoreError: ResponseCode.QUERY_NOT_FOUND}
    assert StoreFull in RESPONSE_CODES
    assert response_code(StoreFull("full"), overrides) == ResponseCode.QUERY_NOT_FOUND


def respond(error: Exception) -> list[tuple[int, str]]:
    channel = FakeChannel()
    respond_error(channel, pull_request(), error)
    return [(response.code, response.remark) for response in channel.responses()]


def test_the_response_to_an_expected_error_has_its_text(caplog: pytest.LogCaptureFixture) -> None:
    assert respond(StoreFull("no room")) == [(ResponseCode.SERVICE_NOT_AVAILABLE, "no room")]
    assert caplog.records == []


def test_a_bug_is_logged_and_its_text_is_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        [(code, remark)] = respond(KeyError("secret"))
    assert code == ResponseCode.SYSTEM_ERROR
    assert "secret" not in remark
    assert "secret" in caplog.text  # the traceback


def test_a_one_way_request_gets_no_error_response() -> None:
    channel = FakeChannel()
    request = send_request(one_way=True)
    assert respond_error(channel, request, StoreFull("full")) == ResponseCode.SERVICE_NOT_AVAILABLE
    assert channel.responses() == []
