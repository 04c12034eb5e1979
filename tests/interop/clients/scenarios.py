"""Run a scenario with a client of another project, in its own process, and collect its events."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.interop.clients import environments
from tests.interop.clients.environments import HERE

TIMEOUT_S = 100  # of a driver process


@dataclass(frozen=True, slots=True)
class Command:
    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ThirdParty:
    """A client of another project, and the command that starts its driver."""

    name: str
    prepare: Callable[[], Command]


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The events that a driver reported, in order."""

    events: list[dict[str, Any]]
    other_output: str  # other output of the driver and of the client
    exit_status: str

    def all(self, event: str) -> list[dict[str, Any]]:
        """Return the events with this name."""
        return [entry for entry in self.events if entry["event"] == event]

    @property
    def sent(self) -> list[dict[str, Any]]:
        return self.all("sent")

    @property
    def received(self) -> list[dict[str, Any]]:
        return self.all("received")

    def __str__(self) -> str:
        lines = [str(event)[:400] for event in self.events]
        return "\n".join([*lines, f"({self.exit_status})", self.other_output[-3000:]])


def _java(version: str) -> ThirdParty:
    def prepare() -> Command:
        return Command(environments.java(version))

    return ThirdParty(f"java-{version}", prepare)


def _python(name: str, requirement: str, *, library_of: str = "") -> ThirdParty:
    def prepare() -> Command:
        python = environments.python(name, [requirement], library_of)
        return Command([*python, str(HERE / "python" / "driver.py"), name])

    return ThirdParty(name, prepare)


def _node(name: str, package: str) -> ThirdParty:
    def prepare() -> Command:
        node, variables = environments.node(name, package)
        return Command([*node, str(HERE / "node" / "driver.js"), name], variables)

    return ThirdParty(name, prepare)


CLIENTS = {
    client.name: client
    for client in (
        _java("5.5.0"),
        _java("4.9.7"),
        _python(
            "rocketmq-client-python",
            "rocketmq-client-python==2.0.0",
            library_of="rocketmq-python-cvs==2.1.0.3",
        ),
        _python("rocketmq", "rocketmq==0.4.4"),
        _node("rocketmq-nodejs", "rocketmq-nodejs@1.1.2"),
        _node("ali-ons", "ali-ons@3.12.0"),
    )
}


def run_scenario(
    client: str,
    scenario: str,
    *,
    namesrv: str,
    topic: str,
    group: str,
    directory: Path,
    java_options: Sequence[str] = (),
    credentials: tuple[str, str] | None = None,
) -> ScenarioResult:
    """Run a scenario and return its events. Raises Unavailable if the client cannot run here.

    With `credentials`, an access key and a secret key, the client signs its requests.
    """
    command = CLIENTS[client].prepare()
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [*command.arguments, namesrv, topic, group, scenario]
    if arguments[0] == "java":
        arguments[1:1] = [f"-Duser.home={directory}", *java_options]
    account = {}
    if credentials is not None:
        access_key, secret_key = credentials
        account = {"INTEROP_ACCESS_KEY": access_key, "INTEROP_SECRET_KEY": secret_key}
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env={**os.environ, **command.variables, **account, "HOME": str(directory)},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        exit_status = f"exited with {process.returncode}"
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
        exit_status = f"killed after {TIMEOUT_S} s"
    finally:
        _kill(process)
    events, other_output = _split_output(output.decode(errors="replace"))
    other_output += errors.decode(errors="replace")
    return ScenarioResult(events, other_output, exit_status)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Kills the whole process group, because children of the driver may outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _split_output(output: str) -> tuple[list[dict[str, Any]], str]:
    """Return the events of the driver, and the lines that the libraries of the client wrote."""
    events, other_lines = [], []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
                continue
        other_lines.append(line)
    return events, "\n".join(other_lines)
