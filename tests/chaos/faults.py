"""What is done to a broker, by a seed: each fault begins, lasts a while, and is over."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.chaos.relay import Relay
from tests.support.brokers import Server, StartFailed

PAUSE_S: Final = (0.3, 2.0)  # between two faults
DISK_MIB: Final = 192
# Those that cannot be had with ordinary means are named, not passed over in silence.
NOT_HERE: Final = {
    "slow disk": "needs a device of its own; tests/simulation has disks that fail and stall"
}


class SmallDisk:
    """A file system of our own, if we may mount one: a disk that can really be full.

    ext4 in a file, or else a tmpfs. That one, when it is full, kills with SIGBUS whoever reads
    where nothing was written.
    """

    def __init__(self, place: Path, mib: int = DISK_MIB) -> None:
        self._place = place
        self._mib = mib
        self._ballast = place / "ballast"
        self._image = place.with_name(f"{place.name}.ext4")
        self.kind = ""
        self.why = ""

    @property
    def is_mounted(self) -> bool:
        return bool(self.kind)

    def __enter__(self) -> SmallDisk:
        self._place.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(self._mib << 20)
        image_name, place = str(self._image), str(self._place)
        commands = {
            "ext4": [
                ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image_name],
                ["mount", "-o", "loop", image_name, place],
            ],
            "tmpfs": [["mount", "-t", "tmpfs", "-o", f"size={self._mib}m", "tmpfs", place]],
        }
        for kind, steps in commands.items():
            try:
                for step in steps:
                    subprocess.run(step, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.why = str(getattr(error, "stderr", "") or error).strip()
                continue
            self.kind = kind
            break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_mounted:
            subprocess.run(["umount", str(self._place)], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)

    def fill(self) -> None:
        """To the last byte."""
        try:
            with self._ballast.open("ab", buffering=0) as file:
                block = b"\0" * (1 << 20)
                while block:
                    try:
                        if file.write(block) < len(block):
                            block = block[: len(block) // 2]
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        block = block[: len(block) // 2]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)


@dataclass
class Faults:
    served: Server
    relay: Relay
    disk: SmallDisk
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._choose = random.Random(self.seed)
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (3, self._kill),
            "stop": (1, self._stop),
            "freeze": (3, self._freeze),
            "reset all": (2, self._reset_all),
            "reset some": (3, self._reset_some),
            "cut off": (1, self._cut_off),
        }
        if self.disk.is_mounted:
            self._kinds["full disk"] = (2, self._fill_disk)
            self._kinds["kill on a full disk"] = (1, self._kill_on_full_disk)

    async def go_on(self, seconds: float) -> None:
        """One after the other, until the time is over; then everything is as it was."""
        names, weights = list(self._kinds), [weight for weight, _ in self._kinds.values()]
        began_s = time.monotonic()
        while (at_s := time.monotonic() - began_s) < seconds:
            [name] = self._choose.choices(names, weights)
            say(f"{at_s:7.1f} s  {name}")
            await self._kinds[name][1]()
            self.done[name] += 1
            await self._wait(*PAUSE_S)

    async def _wait(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._choose.uniform(least_s, most_s))

    async def _kill(self) -> None:
        self.served.kill()
        await self._wait(0, 0.5)
        await asyncio.to_thread(self.served.start)

    async def _stop(self) -> None:
        await asyncio.to_thread(self.served.restart)

    async def _freeze(self) -> None:
        """Long enough that clients give up, at times."""
        os.kill(self.served.pid, signal.SIGSTOP)
        try:
            await self._wait(0.1, 5)
        finally:
            os.kill(self.served.pid, signal.SIGCONT)

    async def _reset_all(self) -> None:
        self.relay.reset(self._choose, 1)

    async def _reset_some(self) -> None:
        for _ in range(self._choose.randrange(1, 6)):
            self.relay.reset(self._choose, 0.3)
            await self._wait(0, 0.2)

    async def _cut_off(self) -> None:
        self.relay.is_cut = True
        self.relay.reset(self._choose, 1)
        await self._wait(0.2, 2)
        self.relay.is_cut = False

    async def _fill_disk(self) -> None:
        await asyncio.to_thread(self.disk.fill)
        await self._wait(0.5, 3)
        self.disk.free()

    async def _kill_on_full_disk(self) -> None:
        """A start is for reads then, or is refused with a word; with room again it may not be."""
        await asyncio.to_thread(self.disk.fill)
        await self._wait(0.1, 1)
        self.served.kill()
        try:
            await asyncio.to_thread(self.served.start)
        except StartFailed as refused:
            is_tmpfs = self.disk.kind == "tmpfs" and refused.exit_code == -signal.SIGBUS
            if refused.exit_code != 2 and not is_tmpfs:
                raise
            self.done["start refused on a full disk"] += 1
        self.disk.free()
        if not self.served.is_alive:
            self.served.forget_exited()
            await asyncio.to_thread(self.served.start)


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
