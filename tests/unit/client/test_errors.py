"""Every error says whether to retry, and whether the request may have taken effect."""

from __future__ import annotations

import inspect

import pytest

from escrowmq import errors
from escrowmq.errors import (
    BrokenBody,
    ClientClosed,
    EscrowError,
    HalfNotDurable,
    InvalidField,
    LocalProtocolError,
    NoRoute,
    NotSent,
    OutcomeUnknown,
    PartialSend,
    RequestRefused,
    TransactionConflict,
    WrongProcess,
)

ERROR_TYPES = [
    error_type
    for _, error_type in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error_type, EscrowError)
]


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda error_type: error_type.__name__)
def test_every_error_says_whether_to_retry_and_whether_it_may_have_happened(
    error_type: type[EscrowError],
) -> None:
    assert isinstance(error_type.retriable, bool)
    assert isinstance(error_type.may_have_happened, bool)


@pytest.mark.parametrize(
    ("error", "retriable", "may_have_happened"),
    [
        (NotSent("x"), True, False),
        (NoRoute("x"), True, False),
        (ClientClosed("x"), False, False),
        (WrongProcess("x"), False, False),
        (OutcomeUnknown("x"), True, True),
        (HalfNotDurable("x"), True, False),
        (PartialSend([1], 3, NotSent("x")), True, True),
        (PartialSend([1], 3, RequestRefused(13, "x")), False, True),
        (LocalProtocolError("x"), False, False),
        (BrokenBody("x"), False, False),
        (TransactionConflict("x", ""), False, False),
        (InvalidField(29, "x"), False, False),
        (RequestRefused(1, "an error inside the broker"), True, True),
        (RequestRefused(2, "busy"), True, False),
        (RequestRefused(14, "not available"), True, False),
        (RequestRefused(16, "no permission"), True, False),
        (RequestRefused(17, "no such topic here"), True, False),
        (RequestRefused(1500, "going away"), True, False),
        (RequestRefused(13, "illegal"), False, False),
        (RequestRefused(604, "too late"), False, False),
    ],
    ids=repr,
)
def test_retriable_and_may_have_happened_of_each_error(
    error: EscrowError, retriable: bool, may_have_happened: bool
) -> None:
    assert (error.retriable, error.may_have_happened) == (retriable, may_have_happened)


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda error_type: error_type.__name__)
def test_the_tree_in_the_docstring_names_every_error(error_type: type[EscrowError]) -> None:
    assert error_type.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("error_type", ERROR_TYPES, ids=lambda error_type: error_type.__name__)
def test_no_error_has_another_flag(error_type: type[EscrowError]) -> None:
    """A misspelled name would leave the value of the base class in effect."""
    flags = {name for name, value in vars(error_type).items() if isinstance(value, bool)}
    assert flags <= {"retriable", "may_have_happened"}
