"""Every exception that this package raises.

EscrowError
  ProtocolError            the bytes, or the order of the commands, violate the protocol
    LocalProtocolError       this side did: a bug in the caller
    RemoteProtocolError      the other side did: close the connection
      FrameTooLong             the frame is longer than the limit, or too short to be a frame
      HeaderTooLong            the header is longer than its frame
      UnknownSerializer        the header is encoded neither as JSON nor as ROCKETMQ
      BrokenHeader             the header cannot be decoded
      BrokenBody               the body cannot be decoded (JSON, batch, compression, record)
  RequestRefused           the other side refused the request; the connection is fine
    InvalidField             a field of the request is missing or has the wrong type
    UnknownRequest           the request code is not supported
    AccessRefused            the account is unknown, the signature wrong, or a permission missing
  TransportError           the network failed, or no broker could be used
    NotSent                  nothing was sent
      ClientClosed             the client is closed, or was never started
      WrongProcess             the client was created before a fork; create one in each process
      WrongEventLoop           the client is used in another event loop than before
    OutcomeUnknown           the request was sent, but no response was received
      BrokenResponse           the response lacks a field, or has one that cannot be true
    NoRoute                  no broker has the topic
    HalfNotDurable           a half was stored less durably than required; it is rolled back
    PartialSend              only the first messages of a large batch are stored
  StoreError               the disk failed, or its contents are wrong
    StoreFull                the disk is full; nothing was stored
    StoreUnavailable         files or memory are short for the moment; nothing was stored
    StoreFailed              a write or flush failed; restart, so that recovery finds the truth
    ReadFailed               bytes of a file cannot be read: a bad sector, or the file was cut short
    FlushTimeout             stored, but not flushed in time; it may become durable later
    StoreLocked              another process uses the directory
    StoreDamaged             the directory cannot be opened as it is
    CorruptRecord            a stored record is damaged
    RecordRefused            a message is too large or has an impossible name; it is not stored
    RecordNotFound           there is no record at this offset
  ConfigError              a setting is missing, misspelt or out of range
    InvalidAccessRules       a file of accounts or certificates is invalid; the old rules stay
    InvalidOption            an option of the Spark source or sink is invalid
  DataLost                 messages were deleted before they were read
  PipelineFailed           a pipeline cannot run; the text says what to change
  SparkNotAvailable        Java or PySpark is missing or too old
  RowRefused               a row of a table cannot become a message
  InvalidSubscription      a filter is invalid, or of a type that is not supported
    InvalidExpression        an SQL92 expression is invalid; the text says where
  InvalidHandler           a handler of an App cannot be used; the text says why
  InvalidPayload           a message is not of the type that its handler takes
  NotComparable            an SQL92 comparison needs a number that a message does not have
  TableFull                a table has reached its limit; nothing was changed
  TooManyOpenTransactions  the limit of open transactions is reached
  TransactionNotFound      there is no such half, or it belongs to another producer group
  AmbiguousTransaction     several transactions have this id
  TransactionConflict      the transaction was decided before, with the other verdict
  TransactionMessageFailed a message could not be sent, so the database transaction is rolled back
  SessionEndedInBlock      the block ended its own database transaction
  CommitUnknown            it is unknown whether the database has committed; check-back finds out
  WriterFenced             a newer run of the writer has registered, or the batch is decided
  ReconcileFailed          a ledger, database or query cannot be read for reconciliation
  NativePanic              the native module found a bug in itself; its state is not known
  CallbackFailed           a function of the application raised what would end the event loop
  BrokerStopped            a broker of escrowmq.testing has failed, or was stopped
  Rollback                 raised by users to roll back a transaction

Every error answers two questions of its caller: `retriable` says whether the same call may succeed
later, and `may_have_happened` says whether the call may have taken effect despite the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_SYSTEM_ERROR: Final = 1

# Response codes after which another broker, or the same broker a little later, may accept the
# request: SYSTEM_ERROR, SYSTEM_BUSY, SERVICE_NOT_AVAILABLE, NO_PERMISSION, TOPIC_NOT_EXIST,
# NO_BUYER_ID, NOT_IN_CURRENT_UNIT and GO_AWAY. This module is below `remoting`, so it cannot use
# the enum.
_RETRIABLE_CODES: Final = frozenset((_SYSTEM_ERROR, 2, 14, 16, 17, 204, 205, 1500))


# Of the type of a panic, which has no other public name.
_PANIC_MODULE: Final = "pyo3_runtime"


class EscrowError(Exception):
    """Base of all exceptions of this package."""

    retriable: bool = False
    may_have_happened: bool = False


# --- protocol ------------------------------------------------------------------------------------


class ProtocolError(EscrowError):
    """The bytes, or the order of the commands, violate the remoting protocol."""


class LocalProtocolError(ProtocolError):
    """The caller tried to send something that the protocol does not allow. This is a bug."""


class RemoteProtocolError(ProtocolError):
    """The peer violated the protocol. The connection cannot be used any more."""


class FrameTooLong(RemoteProtocolError):
    """The length of a frame is over the limit, or too small to be a frame."""


class HeaderTooLong(RemoteProtocolError):
    """The header of a frame is longer than the frame, or than the receiver allows."""


class UnknownSerializer(RemoteProtocolError):
    """The header of a frame is encoded neither as JSON nor as ROCKETMQ."""


class BrokenHeader(RemoteProtocolError):
    """The header of a frame cannot be decoded."""


class BrokenBody(RemoteProtocolError):
    """A body cannot be decoded: JSON, a batch, compressed data or a record."""


class RequestRefused(EscrowError):
    """The peer responded with an error code. The connection can still be used.

    `code` is a ResponseCode, `remark` is the text of the peer.
    """

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"{remark} (code {code})" if remark else f"code {code}")
        self.code = code
        self.remark = remark
        self.retriable = code in _RETRIABLE_CODES
        # An internal error of the broker may have occurred after the work was done.
        self.may_have_happened = code == _SYSTEM_ERROR


class InvalidField(RequestRefused):
    """A field of the request's header is missing or has the wrong type."""


class UnknownRequest(RequestRefused):
    """The peer does not support this request code."""


class AccessRefused(RequestRefused):
    """The account is unknown, the signature is wrong, or the account has no permission."""


# --- network -------------------------------------------------------------------------------------


class TransportError(EscrowError):
    """The network failed, or no broker could be used."""

    retriable = True


class NotSent(TransportError):
    """The request was not sent, so it has had no effect."""


class ClientClosed(NotSent):
    """The client is closed, or was never started."""

    retriable = False


class WrongProcess(NotSent):
    """The client was created before a fork. Create one in each process."""

    retriable = False


class WrongEventLoop(NotSent):
    """The client is used in another event loop than before. Create one in each loop."""

    retriable = False


class OutcomeUnknown(TransportError):
    """The request was sent, but no response was received. It may have taken effect."""

    may_have_happened = True


class BrokenResponse(OutcomeUnknown):
    """A response lacks a field, or has one of a wrong type or with an impossible value.

    The peer has received the request, so it may have taken effect.
    """


class NoRoute(TransportError):
    """No broker that the name servers know has the topic."""


class HalfNotDurable(TransportError):
    """A half was stored, but less durably than required. It is rolled back."""


class PartialSend(TransportError):
    """Only the first messages of a batch that took several requests are stored.

    `results` are the results of the stored messages, in order; `cause` is the error that stopped
    the others. Send only the messages behind the stored ones again.
    """

    may_have_happened = True

    def __init__(self, results: Sequence[Any], count: int, cause: EscrowError) -> None:
        super().__init__(
            f"{len(results)} of {count} messages are stored; send only the others again: {cause}"
        )
        self.results = results
        self.cause = cause
        self.retriable = cause.retriable


# --- store ---------------------------------------------------------------------------------------


class StoreError(EscrowError):
    """The disk failed, or its contents are not what they should be."""


class StoreFull(StoreError):
    """The disk is full. Nothing was stored."""

    retriable = True


class StoreUnavailable(StoreError):
    """The system is short of open files or memory for the moment. Nothing was stored."""

    retriable = True


class StoreFailed(StoreError):
    """A write or flush failed, so it is unknown what is on the disk.

    The store accepts nothing more. Restart it: recovery reads back what is stored.
    """

    may_have_happened = True


class ReadFailed(StoreError):
    """Bytes of a file cannot be read: a bad sector, or the file was cut short.

    Only this read has failed. Other files, and other parts of this file, are not affected.
    """


class FlushTimeout(StoreError):
    """Records are stored but were not flushed in time. They may become durable later."""

    may_have_happened = True


class StoreLocked(StoreError):
    """Another process uses the directory."""


class StoreDamaged(StoreError):
    """The directory cannot be opened as it is."""


class CorruptRecord(StoreError):
    """The record at `log_offset` is damaged; `reason` says how."""

    def __init__(self, log_offset: int, reason: str) -> None:
        super().__init__(f"log_offset={log_offset}: {reason}")
        self.log_offset = log_offset
        self.reason = reason


class RecordRefused(StoreError):
    """A message is too large, or its topic cannot be the name of a file. It is not stored."""


class RecordNotFound(StoreError):
    """There is no record at this offset.

    The offset is below the oldest record, behind the newest one, or inside a record.
    """


# --- configuration and pipelines -----------------------------------------------------------------


class ConfigError(EscrowError):
    """A setting is missing, misspelt or out of range."""


class InvalidAccessRules(ConfigError):
    """A file of accounts or certificates is invalid. The rules in force do not change."""


class InvalidOption(ConfigError):
    """An option of the Spark source or sink is invalid."""


class DataLost(EscrowError):
    """Messages that were to be read are deleted."""


class PipelineFailed(EscrowError):
    """A pipeline cannot run. The text says what to change."""


class SparkNotAvailable(EscrowError):
    """Java or PySpark is missing or too old."""


class RowRefused(EscrowError):
    """A row of a table cannot become a message. The text says which row and why."""


class ReconcileFailed(EscrowError):
    """A ledger, database or query cannot be read for reconciliation."""


# --- consuming -----------------------------------------------------------------------------------


class InvalidSubscription(EscrowError):
    """A filter is invalid, or of a type that is not supported."""


class InvalidExpression(InvalidSubscription):
    """An SQL92 expression is invalid. `position` is the character, counted from 1."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"SQL92, at character {position}: {reason}")
        self.position = position
        self.reason = reason


class InvalidHandler(EscrowError):
    """The signature or an option of a handler cannot be used. The text says what to change."""


class InvalidPayload(EscrowError):
    """The body of a message is not of the type that its handler takes.

    The message moves to the dead letters. A handler may raise it too, for a message that no retry
    can help.
    """


class NotComparable(EscrowError):
    """An SQL92 comparison needs a number that a message does not have: it does not match."""


class TableFull(EscrowError):
    """A table has reached its limit. Nothing was changed."""

    retriable = True


# --- transactions --------------------------------------------------------------------------------


class TooManyOpenTransactions(EscrowError):
    """The limit of open transactions is reached. Nothing was parked."""


class TransactionNotFound(EscrowError):
    """There is no half at this position, or it belongs to another producer group."""


class AmbiguousTransaction(EscrowError):
    """Several transactions have this id. The message lists them with their groups and offsets."""


class TransactionConflict(EscrowError):
    """The transaction was decided before, with the other verdict. The first decision stands.

    `state` is the state that was recorded: committed or rolled_back.
    """

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class WriterFenced(EscrowError):
    """A newer run of the writer has registered, or the batch is already decided."""


class TransactionMessageFailed(EscrowError):
    """A message could not be sent, but the block continued.

    The database transaction and all its messages are rolled back.
    """

    retriable = True


class SessionEndedInBlock(EscrowError):
    """The block committed or rolled back its own database transaction.

    Leave the block instead. The marker shows what the database did, and the messages follow it.
    Look at the database before you repeat the work.
    """

    may_have_happened = True


class CommitUnknown(EscrowError):
    """It is unknown whether the database has committed.

    Check-back makes database and messages agree. Look at the database before you repeat the work.
    """

    may_have_happened = True


class NativePanic(EscrowError):
    """The native module panicked: it has a bug, and may have stopped in the middle of a change."""

    may_have_happened = True


def panic_as_exception(error: BaseException) -> Exception:
    """Return what a call of the native module raised as an Exception.

    A panic is a BaseException, which no `except Exception` catches. Raise `error` itself if it is
    neither: then it is meant to end the process.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__module__ != _PANIC_MODULE:
        raise error
    return NativePanic(f"the native module panicked: {error}")


class CallbackFailed(EscrowError):
    """A checker, handler or listener raised SystemExit, KeyboardInterrupt or another exception that
    would end the event loop of all clients. It is the cause of this error."""


class BrokerStopped(EscrowError):
    """A broker of `escrowmq.testing` has failed, or was stopped."""


class Rollback(EscrowError):
    """Raise this inside the block of a transaction to roll it back. The block swallows it."""
