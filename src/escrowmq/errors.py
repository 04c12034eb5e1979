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
    BadField               a field of the request is missing, or has the wrong type
    UnknownRequest         nobody handles this request code
  TransportError         the network failed
    NotSent                nothing left this machine
    OutcomeUnknown         it was sent, no answer came
    NoRoute                no broker has this topic
    HalfNotSafe            a half was stored less safely than it should be, and is rolled back
  StoreError             the disk, or what is on it
    StoreFull              no room; nothing was stored
    StoreFailed            a write or flush failed; restart, so that recovery finds what is true
    StoreLocked            another process owns the directory
    StoreDamaged           the directory cannot be opened as it is
    CorruptRecord          what is stored there does not check out
    RecordRefused          a message over the size limits, or a name no file can have; not stored
    NoSuchRecord           below the oldest, past the newest, or between two records
  ConfigError            a setting is missing, misspelt or out of range
  RowRefused             a row of a table that cannot be a message
  BadSubscription        what a consumer wants of a topic cannot be read, or is not served here
  TableFull              a table with a bound has reached it; nothing was changed
  EscrowFull             as many transactions are open as may be
  NoSuchTransaction      no half is where it was looked for, or it is somebody else's
  TransactionContradicted  it was decided before, and otherwise
  WriterFenced           a newer writer has taken over, or the batch is past
  Rollback               raised by users: roll this transaction back

Callers ask an error two things, both class attributes: may I retry, and may it have taken
effect?
"""

from __future__ import annotations

from typing import ClassVar


class EscrowError(Exception):
    retriable: ClassVar[bool] = False
    maybe_applied: ClassVar[bool] = False


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


class BadField(RequestRefused):
    pass


class UnknownRequest(RequestRefused):
    pass


class TransportError(EscrowError):
    retriable = True


class NotSent(TransportError):
    pass


class OutcomeUnknown(TransportError):
    maybe_applied = True


class NoRoute(TransportError):
    pass


class HalfNotSafe(TransportError):
    pass


class StoreError(EscrowError):
    pass


class StoreFull(StoreError):
    retriable = True


class StoreFailed(StoreError):
    maybe_applied = True


class StoreLocked(StoreError):
    pass


class StoreDamaged(StoreError):
    pass


class CorruptRecord(StoreError):
    def __init__(self, log_offset: int, why: str) -> None:
        super().__init__(f"log_offset={log_offset}: {why}")
        self.log_offset = log_offset
        self.why = why


class RecordRefused(StoreError):
    pass


class NoSuchRecord(StoreError):
    pass


class ConfigError(EscrowError):
    pass


class RowRefused(EscrowError):
    """A row of a table that cannot be a message; it says which, and why."""


class BadSubscription(EscrowError):
    pass


class TableFull(EscrowError):
    retriable = True


class EscrowFull(EscrowError):
    """As many transactions are open as may be."""


class NoSuchTransaction(EscrowError):
    """No half is where it was looked for, or it is somebody else's."""


class TransactionContradicted(EscrowError):
    """It was decided before, and otherwise. The first decision stands."""

    def __init__(self, message: str, state: str) -> None:
        super().__init__(message)
        self.state = state


class WriterFenced(EscrowError):
    """A newer writer has taken over, or the batch is past."""


class Rollback(EscrowError):
    """Raise it inside a transaction's block to roll it back; it ends there."""
