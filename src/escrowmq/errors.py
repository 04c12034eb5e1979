"""Every exception this package raises.

EscrowError
  ProtocolError          the bytes, or the order of the commands, break the protocol
    LocalProtocolError     ours: a bug in the caller
    RemoteProtocolError    theirs: close the connection
      FrameTooLong           its length is over the limit, or too small to be a frame
      HeaderTooLong          its header is longer than the frame that holds it
      UnknownSerializer      its header is neither JSON nor ROCKETMQ
      BrokenHeader           its header cannot be read
      BrokenBody             its body cannot be read (batch, compression, record)
  RequestRefused         the answer is no; the connection is fine
    InvalidField           a field of the request is missing, or has the wrong type
    UnknownRequest         nobody handles this request code
    AccessRefused          who asks is unknown, did not sign it right, or may not
  TransportError         the network failed
    NotSent                nothing left this machine
      ClientClosed           its client is closed, or was never opened
      WrongProcess           its client was made before a fork; make one in this process
    OutcomeUnknown         it was sent, no answer came
    NoRoute                no broker has this topic
    HalfNotDurable         a half was stored less safely than it should be, and is rolled back
    PartialSend            of a batch that took several requests, only the first ones are stored
  StoreError             the disk, or what is on it
    StoreFull              no room; nothing was stored
    StoreFailed            a write or flush failed; restart, so that recovery finds what is true
    FlushTimeout           stored, but not flushed in time; it may become durable later
    StoreLocked            another process owns the directory
    StoreDamaged           the directory cannot be opened as it is
    CorruptRecord          what is stored there does not check out
    RecordRefused          a message over the size limits, or a name no file can have; not stored
    RecordNotFound         below the oldest, past the newest, or between two records
  ConfigError            a setting is missing, misspelt or out of range
    InvalidAccessRules     a file of accounts or certificates cannot be read; the old rules stay
    InvalidOption          an option of the Spark source or sink is
  DataLost               messages that were to be read are not there any more
  PipelineFailed         a pipeline could not do its work; it says what to change
  SparkNotAvailable      Java or PySpark is not there, or too old
  RowRefused             a row of a table that cannot be a message
  InvalidSubscription    what a consumer wants of a topic cannot be read, or is not served here
    InvalidExpression      an SQL92 expression cannot be read; it says where
  NotComparable          a message has no number where an SQL92 expression needs one: no match
  TableFull              a table with a bound has reached it; nothing was changed
  TooManyOpenTransactions as many transactions are open as may be
  TransactionNotFound    no half is where it was looked for, or it is somebody else's
  TransactionConflict      it was decided before, and otherwise
  TransactionMessageFailed a message could not be sent, so its database transaction is rolled back
  SessionEndedInBlock    a database transaction was ended inside the block that it belongs to
  CommitUnknown          the database did not say whether it has committed; check-back finds out
  WriterFenced           a newer writer has taken over, or the batch is past
  ReconcileFailed        the ledger, a database or a query cannot be read as it should be
  Rollback               raised by users: roll this transaction back

Callers ask an error two things: may I retry (`retriable`), and may it have taken effect
(`may_have_happened`)?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

_SYSTEM_ERROR: Final = 1

# Answers after which another broker, or the same one a little later, may do it: an error inside
# the broker, busy, not available, not allowed here, no such topic here, wrong unit, going away.
_RETRIABLE_CODES: Final = frozenset((_SYSTEM_ERROR, 2, 14, 16, 17, 204, 205, 1500))


class EscrowError(Exception):
    retriable: bool = False
    may_have_happened: bool = False


class ProtocolError(EscrowError):
    pass


class LocalProtocolError(ProtocolError):
    pass


class RemoteProtocolError(ProtocolError):
    pass


class FrameTooLong(RemoteProtocolError):
    pass


class HeaderTooLong(RemoteProtocolError):
    pass


class UnknownSerializer(RemoteProtocolError):
    pass


class BrokenHeader(RemoteProtocolError):
    pass


class BrokenBody(RemoteProtocolError):
    pass


class RequestRefused(EscrowError):
    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"code={code} remark={remark!r}")
        self.code = code
        self.remark = remark
        self.retriable = code in _RETRIABLE_CODES
        # Whatever broke inside the broker may have broken after the work was done.
        self.may_have_happened = code == _SYSTEM_ERROR


class InvalidField(RequestRefused):
    pass


class UnknownRequest(RequestRefused):
    pass


class AccessRefused(RequestRefused):
    pass


class TransportError(EscrowError):
    retriable = True


class NotSent(TransportError):
    pass


class ClientClosed(NotSent):
    retriable = False


class WrongProcess(NotSent):
    retriable = False


class OutcomeUnknown(TransportError):
    may_have_happened = True


class NoRoute(TransportError):
    pass


class HalfNotDurable(TransportError):
    pass


class PartialSend(TransportError):
    """`results` are of the messages that are stored, from the first on; `cause` is what stopped the
    others. Send those that are left, not all of them."""

    may_have_happened = True

    def __init__(self, results: Sequence[Any], count: int, cause: EscrowError) -> None:
        super().__init__(
            f"{len(results)} of {count} messages are stored; send the others again: {cause}"
        )
        self.results = results
        self.cause = cause
        self.retriable = cause.retriable


class StoreError(EscrowError):
    pass


class StoreFull(StoreError):
    retriable = True


class StoreFailed(StoreError):
    may_have_happened = True


class FlushTimeout(StoreError):
    may_have_happened = True


class StoreLocked(StoreError):
    pass


class StoreDamaged(StoreError):
    pass


class CorruptRecord(StoreError):
    def __init__(self, log_offset: int, reason: str) -> None:
        super().__init__(f"log_offset={log_offset}: {reason}")
        self.log_offset = log_offset
        self.reason = reason


class RecordRefused(StoreError):
    pass


class RecordNotFound(StoreError):
    pass


class ConfigError(EscrowError):
    pass


class InvalidAccessRules(ConfigError):
    pass


class InvalidOption(ConfigError):
    pass


class DataLost(EscrowError):
    pass


class PipelineFailed(EscrowError):
    pass


class SparkNotAvailable(EscrowError):
    pass


class RowRefused(EscrowError):
    """A row of a table that cannot be a message; it says which, and why."""


class InvalidSubscription(EscrowError):
    pass


class InvalidExpression(InvalidSubscription):
    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"SQL92, at character {position}: {reason}")
        self.position = position  # counted from 1
        self.reason = reason


class NotComparable(EscrowError):
    pass


class TableFull(EscrowError):
    retriable = True


class TooManyOpenTransactions(EscrowError):
    """As many transactions are open as may be."""


class TransactionNotFound(EscrowError):
    """No half is where it was looked for, or it is somebody else's."""


class TransactionConflict(EscrowError):
    """It was decided before, and otherwise. The first decision stands."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class TransactionMessageFailed(EscrowError):
    """A send failed and the block went on. Database and messages are rolled back."""

    retriable = True


class SessionEndedInBlock(EscrowError):
    """The block committed or rolled back its own database transaction. Let it end by being left:
    whatever that did, the marker knows, and the messages follow it by check-back."""

    may_have_happened = True


class CommitUnknown(EscrowError):
    """The database did not say whether it has committed. Database and messages will agree, by
    check-back; look at the database before doing the work again."""

    may_have_happened = True


class ReconcileFailed(EscrowError):
    """The ledger, a database or a query cannot be read; it says which, and what to give."""


class WriterFenced(EscrowError):
    """A newer writer has taken over, or the batch is past."""


class Rollback(EscrowError):
    """Raise it inside a transaction's block to roll it back; it ends there."""
