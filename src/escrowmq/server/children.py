"""One broker of many: a process of its own, started again whenever it dies.

It is on a leash: its standard input is a pipe that only we hold, so it stops in order if we are
gone, however we went. It says on its standard output when it is ready. Its metrics come over a
socket that we opened and it inherits, so no port has to be found for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Final

from escrowmq.clock import Clock
from escrowmq.errors import NotSent
from escrowmq.secret import Secret
from escrowmq.server.pages import fetch

log = logging.getLogger(__name__)

BACKOFF_S: Final = (0.5, 1, 2, 5, 10, 30)  # before the n-th start in a row
STEADY_S: Final = 60.0  # who has run so long begins anew with these
STOP_S: Final = 60.0  # then it is killed
_ACCOUNT: Final = "ESCROWMQ_INNER_CLIENT_AUTHENTICATION_CREDENTIALS"
_READY: Final = b"escrowmq is ready"
_MAIN: Final = ("-c", "from escrowmq.cli.main import main; main()")


class Child:
    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        clock: Clock,
        account: tuple[str, Secret] | None = None,
    ) -> None:
        """`account`: whose it is when we ask it. It goes by the environment, which only its own
        user can read; a command line is for everybody."""
        self.name = name
        self._arguments = list(arguments)
        self._environment = {**os.environ, **environment}
        self._account = account
        if account is not None:
            self._environment[_ACCOUNT] = json.dumps(
                {"accessKey": account[0], "secretKey": account[1].reveal()}
            )
        self._clock = clock
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._process: Process | None = None
        self._is_stopping = False
        self.exit_code = 0
        self.restarts = 0
        self.ready = asyncio.Event()  # it is, now

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self, failed: asyncio.Event) -> None:
        """Until `stop`. `failed` is set if it ended before it was ever ready."""
        in_a_row = 0
        has_been_ready = False
        while not self._is_stopping:
            began_s = self._clock.elapsed_s()
            await self._run_once()
            has_been_ready = has_been_ready or self.ready.is_set()
            self.ready.clear()
            if self._is_stopping:
                return
            if not has_been_ready:
                failed.set()
                return
            in_a_row = 0 if self._clock.elapsed_s() - began_s >= STEADY_S else in_a_row + 1
            wait_s = BACKOFF_S[min(max(in_a_row - 1, 0), len(BACKOFF_S) - 1)]
            log.error(
                "broker died name=%s exit_code=%d: started again in %s s",
                self.name,
                self.exit_code,
                wait_s,
            )
            self.restarts += 1
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> None:
        number = self._socket.fileno()
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_MAIN,
            *self._arguments,
            *("--metrics-socket", str(number)),
            stdin=PIPE,
            stdout=PIPE,
            env=self._environment,
            pass_fds=(number,),
            start_new_session=True,  # a Ctrl-C is for us; we stop them in order
        )
        log.info("broker started name=%s pid=%d", self.name, process.pid)
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(_READY):
                self.ready.set()
        self.exit_code = await process.wait()
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, running: asyncio.Task[None]) -> None:
        """In order, or by force if that takes too long. `running` is its `run`."""
        self._is_stopping = True
        if self._process is None:
            running.cancel()  # it waits to be started again
        self.signal(signal.SIGTERM)
        _, late = await asyncio.wait([running], timeout=STOP_S)
        if late:
            log.error("broker killed name=%s: it did not stop in %d s", self.name, STOP_S)
            self.signal(signal.SIGKILL)
            await asyncio.wait([running])
        self._socket.close()

    async def ask(self, path: str) -> tuple[int, str]:
        """Over HTTP. Raises NotSent."""
        if self._process is None:
            raise NotSent(f"{self.name} is not running")
        return await fetch(self._socket.getsockname()[1], path, self._account)

    async def why_not_ready(self) -> str | None:
        if not self.ready.is_set():
            return f"{self.name} is starting"
        try:
            status, body = await self.ask("/health/ready")
        except NotSent as error:
            return str(error)
        return None if status == 200 else f"{self.name}: {body.strip()}"
