"""Functions of the application may raise anything; tasks of the client are started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from escrowmq.client import callbacks
from escrowmq.client.callbacks import describe, keep_running, run_callback
from escrowmq.errors import CallbackFailed

SEVERE = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException]


class _Unprintable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no text")


class _Exiting(Exception):
    def __repr__(self) -> str:
        raise SystemExit


def raising(error: BaseException, kind: str) -> Callable[[], Any]:
    """Return a function that raises the error: plain, a coroutine, or one that returns one."""

    def plain() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    return {"plain": plain, "coroutine": coroutine, "returned": lambda: coroutine()}[kind]


@pytest.mark.parametrize("kind", ["plain", "coroutine", "returned"])
@pytest.mark.parametrize("error_type", SEVERE)
async def test_what_would_end_the_event_loop_becomes_a_typed_error(
    error_type: type[BaseException], kind: str
) -> None:
    error = error_type("why")
    with pytest.raises(CallbackFailed, match="why") as raised:
        await run_callback(raising(error, kind))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("kind", ["plain", "coroutine", "returned"])
async def test_an_ordinary_error_is_raised_as_it_is(kind: str) -> None:
    with pytest.raises(ZeroDivisionError):
        await run_callback(raising(ZeroDivisionError(), kind))


async def test_a_stop_iteration_ends_the_call() -> None:
    """A future cannot carry it: the call would never return."""
    with pytest.raises(RuntimeError):
        await run_callback(raising(StopIteration(), "plain"))


async def test_a_task_that_is_cancelled_itself_ends() -> None:
    task = asyncio.create_task(run_callback(asyncio.Event().wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_any_error_can_be_described() -> None:
    assert describe(ValueError("x" * 10_000)).startswith("ValueError('xxx")
    assert len(describe(ValueError("x" * 10_000))) == 500
    assert describe(ValueError("\ud800")).encode()
    assert describe(_Unprintable()) == "_Unprintable (its text cannot be shown)"
    assert describe(_Exiting()) == "_Exiting (its text cannot be shown)"


async def test_a_task_that_fails_is_logged_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(callbacks, "RESTART_PAUSE_S", 0.0)
    errors = iter([ValueError("first"), KeyError("second"), None])

    async def run() -> None:
        error = next(errors)
        if error is not None:
            raise error

    with caplog.at_level(logging.ERROR):
        await keep_running("pull", run)
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert "task=pull" in caplog.text
