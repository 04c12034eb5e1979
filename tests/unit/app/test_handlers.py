"""What the annotations of a handler say, and what is refused when it is defined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.app import App, InvalidHandler, Retry
from escrowmq.app.handlers import AppHandler, Argument, read_signature
from escrowmq.errors import ConfigError
from escrowmq.sql import AsyncTransactionMessages, TransactionMessages
from tests.support.sql_bank import received_message

if TYPE_CHECKING:
    from decimal import Decimal

SERVERS = "127.0.0.1:1"  # never connected to


@dataclass
class Transfer:
    cents: int


class OwnSession(Session):
    """A session of the application."""


class Unknown:
    """A type that no codec knows."""


def app() -> App:
    return App(SERVERS, group="g")


def sync_app() -> App:
    return App(SERVERS, group="g", database=create_engine("sqlite:///never-opened.db"))


def async_app() -> App:
    engine = create_async_engine("sqlite+aiosqlite:///never-opened.db")
    return App(SERVERS, group="g", database=engine)


def handler_of(application: App) -> AppHandler:
    [handler] = application.handlers
    return handler


# --- what is recognised --------------------------------------------------------------------------


def test_parameters_are_found_by_annotation_in_any_order() -> None:
    def handle(
        tx: TransactionMessages, raw: ReceivedMessage, transfer: Transfer, session: OwnSession
    ) -> None: ...

    signature = read_signature(handle)
    assert signature.arguments == (
        Argument.TRANSACTION_MESSAGES,
        Argument.MESSAGE,
        Argument.PAYLOAD,
        Argument.SESSION,
    )
    assert (signature.is_async, signature.is_batch) == (False, False)


def test_a_list_is_a_batch() -> None:
    async def handle(raw: list[ReceivedMessage], transfers: list[Transfer]) -> None: ...

    signature = read_signature(handle)
    assert (signature.is_async, signature.is_batch) == (True, True)
    assert signature.payload is not None
    assert signature.payload.decode(b'{"cents":3}') == Transfer(3)


def test_arguments_are_given_in_the_order_of_the_parameters() -> None:
    calls: list[tuple[Any, ...]] = []
    application = sync_app()

    @application.on("t")
    def handle(transfer: Transfer, session: Session, raw: ReceivedMessage) -> None:
        calls.append((transfer, session, raw))

    message = received_message("m")
    handler_of(application).call([message], [Transfer(1)], "session", None)
    assert calls == [(Transfer(1), "session", message)]


def test_a_decorated_function_is_returned_as_it_is() -> None:
    def handle(body: bytes) -> None: ...

    assert app().on("t")(handle) is handle


# --- what is refused -----------------------------------------------------------------------------


def no_annotation(transfer) -> None: ...  # type: ignore[no-untyped-def]  # that is the mistake
def no_payload(session: Session) -> None: ...
def no_parameter() -> None: ...
def two_payloads(first: Transfer, second: dict[str, int]) -> None: ...
def two_sessions(first: Session, second: Session, body: bytes) -> None: ...
def keyword_only(*, transfer: Transfer) -> None: ...
def any_number(*transfers: Transfer) -> None: ...
def unknown_payload(payload: Unknown) -> None: ...
def unknown_in_payload(payload: dict[str, Unknown]) -> None: ...
def list_of_sessions(sessions: list[Session], body: bytes) -> None: ...
def half_a_batch(raw: ReceivedMessage, bodies: list[bytes]) -> None: ...
def not_imported(amount: Decimal) -> None: ...
def result_without_topic(body: bytes) -> Transfer: ...  # type: ignore[empty-body]  # only read
def session_without_database(session: Session, body: bytes) -> None: ...
def tx_without_database(tx: TransactionMessages, body: bytes) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_annotation, "parameter transfer has no annotation"),
        (no_payload, "takes neither a payload nor a ReceivedMessage"),
        (no_parameter, "takes neither a payload nor a ReceivedMessage"),
        (two_payloads, "parameter second is a second payload"),
        (two_sessions, "parameter second is a second session"),
        (keyword_only, "must be positional"),
        (any_number, "must be positional"),
        (unknown_payload, "Unknown cannot be a payload"),
        (unknown_in_payload, "Unknown is no msgspec.Struct"),
        (list_of_sessions, "there is only one per batch"),
        (half_a_batch, "must both be a list"),
        (not_imported, "'Decimal' is not defined; import the type outside"),
        (result_without_topic, "with send_to= a payload; this one returns Transfer"),
        (session_without_database, "it takes Session, but the App has no database="),
        (tx_without_database, "it takes TransactionMessages, but the App has no database="),
    ],
)
def test_a_signature_that_cannot_be_used_is_refused_with_a_sentence(
    function: Any, reason: str
) -> None:
    application = app()
    with pytest.raises(InvalidHandler) as caught:
        application.on("t")(function)
    assert reason in str(caught.value)
    assert f"handler {function.__name__}: " in str(caught.value)
    assert application.handlers == []


def test_a_class_is_no_handler() -> None:
    with pytest.raises(InvalidHandler, match="is no function"):
        app().on("t")(Transfer)


def sync_with_session(session: Session, body: bytes) -> None: ...
def sync_with_async_session(session: AsyncSession, body: bytes) -> None: ...
def sync_with_async_tx(tx: AsyncTransactionMessages, body: bytes) -> None: ...
async def async_with_session(session: Session, body: bytes) -> None: ...
async def async_with_async_session(session: AsyncSession, body: bytes) -> None: ...
async def async_with_sync_tx(tx: TransactionMessages, body: bytes) -> None: ...
async def async_result(body: bytes) -> Message | None: ...


@pytest.mark.parametrize(
    ("create_app", "function", "reason"),
    [
        (sync_app, async_with_session, "with an Engine it must be a plain function"),
        (sync_app, async_result, "with an Engine it must be a plain function"),
        (sync_app, sync_with_async_session, "with an Engine it gets Session, not AsyncSession"),
        (sync_app, sync_with_async_tx, "it gets TransactionMessages, not AsyncTransactionMessages"),
        (async_app, sync_with_session, "with an AsyncEngine it must be `async def`"),
        (async_app, async_with_session, "with an AsyncEngine it gets AsyncSession, not Session"),
        (async_app, async_with_sync_tx, "it gets AsyncTransactionMessages, not"),
    ],
)
def test_a_handler_of_the_other_kind_than_the_engine_is_refused(
    create_app: Any, function: Any, reason: str
) -> None:
    with pytest.raises(InvalidHandler) as caught:
        create_app().on("t")(function)
    assert reason in str(caught.value)


def test_handlers_of_both_kinds_fit_if_they_need_no_transaction() -> None:
    application = sync_app()
    application.on("t")(sync_with_session)

    @application.on("u")
    async def handle(body: bytes) -> None: ...

    application = async_app()
    application.on("t")(async_with_async_session)
    assert len(application.handlers) == 1


def test_a_batch_cannot_be_ordered() -> None:
    def handle(bodies: list[bytes]) -> None: ...

    with pytest.raises(InvalidHandler, match="a batch has no order by key"):
        app().on("t", ordered=True)(handle)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"batch_size": 0}])
def test_sizes_are_at_least_one(options: dict[str, int]) -> None:
    def handle(bodies: list[bytes]) -> None: ...

    with pytest.raises(InvalidHandler, match="at least 1"):
        app().on("t", **options)(handle)  # type: ignore[arg-type]  # a table of options


def test_an_engine_of_another_library_is_refused() -> None:
    with pytest.raises(ConfigError, match="an Engine, an AsyncEngine or a DjangoDatabase"):
        App(SERVERS, group="g", database="sqlite:///x.db")  # type: ignore[arg-type]  # that is it


# --- results -------------------------------------------------------------------------------------


def result_messages(function: Any, result: object, *, send_to: str = "") -> list[Message]:
    application = app()
    application.on("t", send_to=send_to)(function)
    return handler_of(application).messages_of(result)


def message_or_none(body: bytes) -> Message | None: ...
def several_messages(body: bytes) -> list[Message]: ...  # type: ignore[empty-body]  # only read
def transfer_or_none(body: bytes) -> Transfer | None: ...
def text(body: bytes) -> str: ...  # type: ignore[empty-body]  # only read


def test_results_become_messages() -> None:
    first, second = Message("a", b"1"), Message("b", b"2")
    assert result_messages(message_or_none, first) == [first]
    assert result_messages(message_or_none, None) == []
    assert result_messages(several_messages, [first, second]) == [first, second]
    sent = result_messages(transfer_or_none, Transfer(3), send_to="out")
    assert sent == [Message("out", b'{"cents":3}')]
    assert result_messages(transfer_or_none, None, send_to="out") == []
    assert result_messages(text, "für", send_to="out") == [Message("out", "für".encode())]


def test_a_result_that_is_no_message_is_refused() -> None:
    with pytest.raises(TypeError, match="returned 7"):
        result_messages(several_messages, [7])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (message_or_none, "a Message has a topic"),
        (lambda body: None, "has no annotation"),
        (no_payload, "neither a payload"),
    ],
)
def test_send_to_needs_a_payload_as_result(function: Any, reason: str) -> None:
    with pytest.raises(InvalidHandler, match=reason):
        app().on("t", send_to="out")(function)


def test_send_to_without_a_result_is_refused() -> None:
    def handle(body: bytes) -> None: ...

    with pytest.raises(InvalidHandler, match="this one returns nothing"):
        app().on("t", send_to="out")(handle)


# --- retries -------------------------------------------------------------------------------------


def test_delays_grow_up_to_the_maximum() -> None:
    retry = Retry(times=5, first_s=1, factor=2, max_s=10)
    assert [retry.delay_s(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert retry.delay_s(100_000) == 10


@pytest.mark.parametrize(
    "options", [{"times": -1}, {"first_s": -1.0}, {"factor": 0.5}, {"first_s": 9.0, "max_s": 1.0}]
)
def test_an_impossible_retry_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        Retry(**options)
