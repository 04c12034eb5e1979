"""Let real processes run on a system that fails: file calls with errors, and a wrong clock.

    system = FaultySystem(tmp_path)
    with Server(tmp_path, environment=system.environment) as server:
        system.inject(Fault("fdatasync", "commitlog", "EIO"))

A `sitecustomize` module, which Python imports at its start, wraps the calls in the process and in
its children. Before each of them it reads a file of this test, so that a test can change the faults
while the process runs.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

MEMORY_ERROR: Final = "MemoryError"
FOREVER: Final = 1 << 30
# The calls that the store makes.
_CALLS: Final = ("open", "pwrite", "ftruncate", "fdatasync", "fsync", "rename", "unlink", "listdir")
_VARIABLE: Final = "TEST_FAULTS_FILE"
_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """`call` of a file whose path contains `path` raises `error` (a name of errno) `times` times.

    A call that `hangs` never returns, as if the disk did not respond.
    """

    call: str
    path: str
    error: str
    times: int = 1
    hangs: bool = False


class FaultySystem:
    """The faults that processes with `environment` see."""

    def __init__(self, directory: Path) -> None:
        modules = directory / "faulty-system"
        modules.mkdir(parents=True)
        (modules / "sitecustomize.py").write_text(
            "from tests.support.faulty_system import install\ninstall()\n"
        )
        self._file = modules / "faults.json"
        self._faults: tuple[Fault, ...] = ()
        self._clock_offset_ms = 0
        self.environment = {
            # What the tests import comes before what is installed.
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(modules), str(_ROOT), os.environ.get("PYTHONPATH", "")))
            ),
            _VARIABLE: str(self._file),
        }
        self._write()

    def inject(self, *faults: Fault) -> None:
        """Replace all faults by these."""
        self._faults = faults
        self._write()

    def set_clock(self, *, offset_ms: int) -> None:
        """Let the wall clock be wrong by this much. Files keep the times of the real clock."""
        self._clock_offset_ms = offset_ms
        self._write()

    def _write(self) -> None:
        content = {
            "faults": [asdict(fault) for fault in self._faults],
            "clock_offset_ms": self._clock_offset_ms,
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(content))
        new.replace(self._file)


# --- in the process ------------------------------------------------------------------------------


def install() -> None:
    """Wrap the calls of this process. Without a file of faults, do nothing."""
    file = os.environ.get(_VARIABLE)
    if file is not None:
        calls = _FaultyCalls(file)
        for name in _CALLS:
            setattr(os, name, calls.wrap(name, getattr(os, name)))
        calls.wrap_clock()


class _FaultyCalls:
    def __init__(self, file: str) -> None:
        self._file = file
        self._content = b""
        self._remaining: list[tuple[Fault, list[int]]] = []  # how often each is still to be raised
        self._clock_offset_ms = 0
        self._real_open = os.open

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            self._raise_fault(name, target)
            return function(target, *arguments, **options)

        return call

    def wrap_clock(self) -> None:
        time_ns, seconds = time.time_ns, time.time

        def wrong_time_ns() -> int:
            self._load()
            return time_ns() + self._clock_offset_ms * 1_000_000

        def wrong_time() -> float:
            self._load()
            return seconds() + self._clock_offset_ms / 1000

        time.time_ns, time.time = wrong_time_ns, wrong_time

    def _raise_fault(self, name: str, target: Any) -> None:
        self._load()
        for fault, remaining in self._remaining:
            if remaining[0] and fault.call == name and fault.path in _path_of(target):
                remaining[0] -= 1
                if fault.hangs:
                    threading.Event().wait()
                if fault.error == MEMORY_ERROR:
                    raise MemoryError
                number = getattr(errno, fault.error)
                raise OSError(number, os.strerror(number))

    def _load(self) -> None:
        descriptor = self._real_open(self._file, os.O_RDONLY)
        try:
            content = os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
        if content != self._content:
            self._content = content
            values = json.loads(content)
            self._clock_offset_ms = values["clock_offset_ms"]
            faults = [Fault(**fields) for fields in values["faults"]]
            self._remaining = [(fault, [fault.times]) for fault in faults]


def _path_of(target: Any) -> str:
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
