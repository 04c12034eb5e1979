"""Let one client play one scenario in a process of its own, and keep what it told."""

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

LIMIT_S = 100  # of one process, whatever it waits for


@dataclass(frozen=True, slots=True)
class Command:
    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ThirdParty:
    """A client that others wrote: what it is, and how its driver is started."""

    name: str
    prepare: Callable[[], Command]


@dataclass(frozen=True, slots=True)
class Told:
    """What a driver said, line by line."""

    lines: list[dict[str, Any]]
    rest: str  # what it, or the client, wrote besides
    ended: str

    def all(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]

    @property
    def sent(self) -> list[dict[str, Any]]:
        return self.all("sent")

    @property
    def got(self) -> list[dict[str, Any]]:
        return self.all("got")

    def __str__(self) -> str:
        shown = [str(line)[:400] for line in self.lines]
        return "\n".join([*shown, f"({self.ended})", self.rest[-3000:]])


def _java(version: str) -> ThirdParty:
    def prepare() -> Command:
        return Command(environments.java(version))

    return ThirdParty(f"java-{version}", prepare)


def _python(name: str, *wanted: str, library_of: str = "") -> ThirdParty:
    def prepare() -> Command:
        python = environments.python(name.lower(), wanted, library_of)
        return Command([*python, str(HERE / "python" / "driver.py"), name])

    return ThirdParty(name, prepare)


def _node(name: str, package: str) -> ThirdParty:
    def prepare() -> Command:
        node, variables = environments.node(name.lower(), package)
        return Command([*node, str(HERE / "node" / "driver.js"), name], variables)

    return ThirdParty(name, prepare)


def _spring(version: str) -> ThirdParty:
    def prepare() -> Command:
        return Command(environments.spring(version))

    return ThirdParty(f"spring-{version}", prepare)


def _go() -> ThirdParty:
    def prepare() -> Command:
        return Command(environments.go())

    return ThirdParty("go-2.1.2", prepare)


CLIENTS = {
    client.name: client
    for client in (
        _java("5.5.0"),
        _java("4.9.7"),
        _python("A", "rocketmq-client-python==2.0.0", library_of="rocketmq-python-cvs==2.1.0.3"),
        _python("B", "rocketmq==0.4.4"),
        _node("C", "rocketmq-nodejs@1.1.2"),
        _node("D", "ali-ons@3.12.0"),
        _spring("2.3.5"),
        _go(),
    )
}


def play(
    client: str,
    scenario: str,
    *,
    namesrv: str,
    topic: str,
    group: str,
    directory: Path,
    java_options: Sequence[str] = (),
    keys: tuple[str, str] | None = None,
) -> Told:
    """Raises `environments.Unavailable` if the client cannot run here. `keys`: its account."""
    command = CLIENTS[client].prepare()
    directory.mkdir(parents=True, exist_ok=True)
    arguments = [*command.arguments, namesrv, topic, group, scenario]
    if arguments[0] == "java":
        arguments[1:1] = [f"-Duser.home={directory}", *java_options]
    account = {}
    if keys is not None:
        account = {"INTEROP_ACCESS_KEY": keys[0], "INTEROP_SECRET_KEY": keys[1]}
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
        output, errors = process.communicate(timeout=LIMIT_S)
        ended = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
        ended = f"killed after {LIMIT_S} s"
    finally:
        _kill(process)
    lines, rest = _sorted(output.decode(errors="replace"))
    return Told(lines, rest + errors.decode(errors="replace"), ended)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _sorted(output: str) -> tuple[list[dict[str, Any]], str]:
    """Our lines, and the others: the clients' libraries write to the same place."""
    lines, rest = [], []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            if isinstance(told, dict) and "event" in told:
                lines.append(told)
                continue
        rest.append(line)
    return lines, "\n".join(rest)
