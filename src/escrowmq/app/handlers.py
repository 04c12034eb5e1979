"""Handlers: what the signature of a function says about the messages it takes.

    def credit(session: Session, transfer: Transfer) -> None

Parameters are found by their annotation, in any order:

    Session, AsyncSession                            the database transaction, with the inbox row
    TransactionMessages, AsyncTransactionMessages    sends messages in that transaction
    ReceivedMessage, list[ReceivedMessage]           the message itself, or those of a batch
    any other type, list[type]                       the payload, or those of a batch

A result is a message to send: a `Message`, several in a list, or a payload for the topic `send_to`.
Everything that can be wrong with a signature raises InvalidHandler when the handler is defined.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Union, get_args, get_origin

from escrowmq.app.payloads import PayloadCodec, payload_codec, type_name
from escrowmq.client.messages import Message, ReceivedMessage
from escrowmq.errors import InvalidHandler, InvalidPayload
from escrowmq.message.filter import FilterLike, parse_filter

BATCH_SIZE: Final = 100
_RESULT_HELP: Final = (
    "a handler returns None, a Message or a list of messages, or with send_to= a payload"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often a message whose handler failed comes again, and when.

        Retry(times=5, first_s=1, factor=2)      # after 1 s, 2 s, 4 s, 8 s and 16 s

    After the last time it moves to the dead letters of the group, with the cause. The delay is
    exact with an EscrowMQ broker, up to its `timerPrecisionMs`; Apache RocketMQ takes the next
    longer one of its delay levels. Raises ValueError for an invalid value.
    """

    times: int = 16
    first_s: float = 10.0
    factor: float = 2.0
    max_s: float = 7_200.0

    def __post_init__(self) -> None:
        if self.times < 0 or self.first_s < 0 or self.factor < 1 or self.max_s < self.first_s:
            raise ValueError(
                f"{self} is invalid: times and first_s must not be negative, factor must be at "
                "least 1, and max_s at least first_s"
            )

    def delay_s(self, failures: int) -> float:
        """Return the delay after so many failures in a row, at least one."""
        # A power that is too large to compute is beyond any maximum.
        try:
            return min(self.max_s, self.first_s * self.factor ** (failures - 1))
        except OverflowError:
            return self.max_s


class Argument(enum.Enum):
    """What a parameter of a handler is given."""

    SESSION = enum.auto()
    TRANSACTION_MESSAGES = enum.auto()
    MESSAGE = enum.auto()
    PAYLOAD = enum.auto()


@dataclass(frozen=True, slots=True)
class Signature:
    """What the annotations of a function say."""

    arguments: tuple[Argument, ...]
    types: tuple[Any, ...]  # of the same parameters
    is_async: bool
    is_batch: bool
    payload: PayloadCodec | None
    payload_name: str
    result: Any  # the annotation; None if nothing is sent

    def type_of(self, argument: Argument) -> Any:
        """Return the annotation of the parameter; None if there is none."""
        pairs = zip(self.arguments, self.types, strict=True)
        return next((annotation for kind, annotation in pairs if kind is argument), None)


class AppHandler:
    """A function of the application, and which messages it gets how."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        topic: str,
        expression: FilterLike,
        retry: Retry,
        concurrency: int,
        ordered: bool,
        batch_size: int,
        send_to: str,
    ) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self.function = function
        self.topic = topic
        self.subscribed = expression
        self.expression = parse_filter(expression)
        self.retry = retry
        self.concurrency = concurrency
        self.ordered = ordered
        try:
            self.signature = read_signature(function)
            self._encode_result = _result_encoder(self.signature.result, send_to)
        except InvalidHandler as error:
            raise InvalidHandler(f"handler {self.name}: {error}") from error
        if concurrency < 1 or batch_size < 1:
            raise self.invalid("concurrency and batch_size must be at least 1")
        if ordered and self.signature.is_batch:
            raise self.invalid("a batch has no order by key; take one message at a time")
        self.batch_size = batch_size if self.signature.is_batch else 1

    def invalid(self, reason: str) -> InvalidHandler:
        return InvalidHandler(f"handler {self.name}: {reason}")

    @property
    def sends_results(self) -> bool:
        return self._encode_result is not None

    @property
    def sends(self) -> bool:
        """Whether it sends messages: as results, or in its transaction."""
        return self.sends_results or Argument.TRANSACTION_MESSAGES in self.signature.arguments

    def decode(self, message: ReceivedMessage) -> Any:
        """Return the payload of a message, None if it takes none. Raises InvalidPayload."""
        codec = self.signature.payload
        if codec is None:
            return None
        try:
            return codec.decode(message.body)
        except Exception as error:  # a validator of the application may raise anything
            raise InvalidPayload(f"no {self.signature.payload_name}: {error}") from error

    def call(
        self, messages: list[ReceivedMessage], payloads: list[Any], session: Any, tx: Any
    ) -> Any:
        """Call the function. The result is an awaitable if it is a coroutine function."""
        is_batch = self.signature.is_batch
        values = {
            Argument.SESSION: session,
            Argument.TRANSACTION_MESSAGES: tx,
            Argument.MESSAGE: messages if is_batch else messages[0],
            Argument.PAYLOAD: payloads if is_batch else payloads[0],
        }
        return self.function(*(values[argument] for argument in self.signature.arguments))

    def messages_of(self, result: Any) -> list[Message]:
        """Return the messages to send for a result. Raises TypeError if it is of another type."""
        if self._encode_result is None or result is None:
            return []
        return self._encode_result(result)


# --- signatures ----------------------------------------------------------------------------------


def read_signature(function: Callable[..., Any]) -> Signature:
    """Return what a function takes and returns. Raises InvalidHandler."""
    if not callable(function) or isinstance(function, type):
        raise InvalidHandler(f"{function!r} is no function")
    hints = _annotations(function)
    arguments, annotations, batches = [], [], set()
    payload: Any = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise InvalidHandler(f"parameter {parameter} must be positional, without * or **")
        if parameter.name not in hints:
            raise InvalidHandler(
                f"parameter {parameter.name} has no annotation; it says what the handler gets"
            )
        annotation = hints[parameter.name]
        element, is_batch = _element_type(annotation)
        argument = _argument(element)
        if argument in arguments:
            word = argument.name.lower().replace("_", " ")
            raise InvalidHandler(f"parameter {parameter.name} is a second {word}")
        if argument is Argument.PAYLOAD:
            payload = element
        if argument in (Argument.PAYLOAD, Argument.MESSAGE):
            batches.add(is_batch)
        elif is_batch:
            raise InvalidHandler(f"parameter {parameter.name}: there is only one per batch")
        arguments.append(argument)
        annotations.append(element)
    if not batches:
        raise InvalidHandler("it takes neither a payload nor a ReceivedMessage")
    if len(batches) > 1:
        raise InvalidHandler("payload and message must both be a list, or neither")
    result = hints.get("return")
    return Signature(
        arguments=tuple(arguments),
        types=tuple(annotations),
        is_async=inspect.iscoroutinefunction(function),
        is_batch=batches == {True},
        payload=None if payload is None else payload_codec(payload),
        payload_name="" if payload is None else type_name(payload),
        result=None if result is type(None) else result,
    )


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise InvalidHandler(
            f"an annotation cannot be resolved: {error}; import the type outside of "
            "`if TYPE_CHECKING`, and define it at the level of the module"
        ) from error
    except TypeError as error:
        raise InvalidHandler(f"an annotation is no type: {error}") from error


def _element_type(annotation: Any) -> tuple[Any, bool]:
    """Return the type of one message, and whether the annotation is that of a batch."""
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def _argument(annotation: Any) -> Argument:
    from escrowmq.database.transaction import AsyncTransactionMessages, TransactionMessages

    if annotation is ReceivedMessage:
        return Argument.MESSAGE
    if annotation in (TransactionMessages, AsyncTransactionMessages):
        return Argument.TRANSACTION_MESSAGES
    if isinstance(annotation, type) and issubclass(annotation, session_types()):
        return Argument.SESSION
    return Argument.PAYLOAD


def session_types() -> tuple[type, ...]:
    """Return the types of sessions, if the application has imported SQLAlchemy."""
    names = (("sqlalchemy.orm", "Session"), ("sqlalchemy.ext.asyncio", "AsyncSession"))
    return tuple(
        getattr(sys.modules[module], name) for module, name in names if module in sys.modules
    )


# --- results -------------------------------------------------------------------------------------


def _result_encoder(annotation: Any, send_to: str) -> Callable[[Any], list[Message]] | None:
    """Return what turns a result into messages; None if the handler sends none."""
    alternatives = [kind for kind in _alternatives(annotation) if kind is not type(None)]
    if not send_to and not alternatives:
        return None
    if alternatives and all(kind in (Message, list[Message]) for kind in alternatives):
        if send_to:
            raise InvalidHandler("a Message has a topic; leave send_to= out")
        return _checked_messages
    if not send_to or not alternatives:
        given = type_name(annotation) if alternatives else "nothing"
        raise InvalidHandler(f"{_RESULT_HELP}; this one returns {given}")
    codec = payload_codec(alternatives[0] if len(alternatives) == 1 else annotation)
    return lambda result: [Message(send_to, codec.encode(result))]


def _alternatives(annotation: Any) -> list[Any]:
    if annotation is None:
        return []
    if get_origin(annotation) in (Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def _checked_messages(result: Any) -> list[Message]:
    messages = result if isinstance(result, list) else [result]
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"{_RESULT_HELP}; this one returned {message!r}")
    return messages
