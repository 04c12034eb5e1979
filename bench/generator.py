"""The load generator in `load/`: build it on first use, run it, and read its result.

The program is kept in the user's cache, by a digest of its source.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

SOURCE = Path(__file__).parent / "load"
FLAGS = ("-O2", "-std=gnu11", "-Wall", "-Wextra")
SECURE = "load-secure"  # the same program with accounts and TLS; it needs the headers of OpenSSL
SECURE_FLAGS = ("-DSECURE", "-lssl", "-lcrypto")
GRACE_S = 30  # in addition to the load: connecting, and waiting for the last responses


class NoCompiler(Exception):
    """The generator cannot be built here. The text is one line with the reason."""


class LoadFailed(Exception):
    """The generator failed. The text is its output."""


@dataclass(frozen=True)
class Load:
    """A load: a number of connections, each with a number of requests in flight."""

    mode: str  # echo, send, pull or tx
    connections: int = 1
    depth: int = 1
    seconds: float = 5.0
    warm_up_s: float = 1.0
    topic: str = "bench"
    topics: int = 0  # 0: the topic itself; otherwise this many topics, with a number after the name
    queues: int = 4
    body_bytes: int = 1024
    acknowledged: bool = False  # tx: wait for the response to the commit
    account: tuple[str, str] | None = None  # access key and secret: every request is signed
    has_tls: bool = False

    def arguments(self) -> list[str]:
        words = {
            "connections": self.connections,
            "depth": self.depth,
            "seconds": self.seconds,
            "warm-up": self.warm_up_s,
            "topic": self.topic,
            "topics": self.topics,
            "queues": self.queues,
            "body": self.body_bytes,
        }
        flags = ["--acknowledged"] if self.acknowledged else []
        if self.account is not None:
            flags.append(f"--account={','.join(self.account)}")
        if self.has_tls:
            flags.append("--tls")
        return [self.mode, *(f"--{name}={value}" for name, value in words.items()), *flags]


class Outcome(msgspec.Struct, frozen=True):
    """The result of one run. The first fields cover the measured seconds, the last ones all."""

    seconds: float
    messages: int
    answers: int
    rate: float  # messages per second
    answer_rate: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    bytes_in: int
    bytes_out: int
    server_cpu_s: float
    generator_cpu_s: float
    machine_cpu_s: float
    messages_in_all: int
    unanswered: int
    broker_requests: int
    errors: dict[str, int]  # by response code
    unasked: dict[str, int]  # responses to one-way requests: the broker dropped them

    @property
    def others_cores(self) -> float:
        """Return how many cores other processes used."""
        known_s = self.server_cpu_s + self.generator_cpu_s
        return max(0.0, self.machine_cpu_s - known_s) / self.seconds


def run(load: Load, ports: Sequence[int], pids: Sequence[int]) -> Outcome:
    """Run the load against these ports of 127.0.0.1; connections are spread over them in turn.

    The CPU time of the given processes is measured.
    """
    name = SECURE if load.account is not None or load.has_tls else "load"
    command = [str(built(name)), *load.arguments(), f"--port={','.join(map(str, ports))}"]
    if pids:
        command.append(f"--server={','.join(map(str, pids))}")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=load.warm_up_s + load.seconds + GRACE_S,
    )
    if done.returncode != 0:
        raise LoadFailed(done.stderr.strip() or f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Outcome)


@functools.cache
def built(name: str) -> Path:
    """Return the program built from `load/<name>.c`, or SECURE. Raises NoCompiler."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    program = _cache() / f"{name}-{digest.hexdigest()[:16]}"
    if not program.exists():
        is_secure = name == SECURE
        source = SOURCE / ("load.c" if is_secure else f"{name}.c")
        _compile(source, program, SECURE_FLAGS if is_secure else ())
    return program


def _compile(source: Path, program: Path, more_flags: Sequence[str]) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoCompiler("the load generator needs a C compiler, and there is no `cc` on the path")
    program.parent.mkdir(parents=True, exist_ok=True)
    # Two runs may build at the same time: each writes its own file, and either is good.
    with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
        built = Path(scratch) / program.name
        command = [compiler, *FLAGS, "-o", str(built), str(source), *more_flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NoCompiler(f"`cc` could not build {source.name}: {_first_error(done.stderr)}")
        built.rename(program)


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "escrowmq-bench"
