"""Inject faults into a broker, chosen by a seed. Each fault lasts a while and is then removed."""

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
# Faults that this program cannot inject, with the reason. The report lists them.
UNSUPPORTED: Final = {
    "slow disk": "needs its own block device; tests/simulation has disks that fail and stall"
}


class SmallDisk:
    """A small file system, mounted if permissions allow, which can really be full.

    It is ext4 in a file, or else a tmpfs. On a full tmpfs, a process that reads a mapped but
    unwritten page is killed by SIGBUS.
    """

    def __init__(self, mount_point: Path, mib: int = DISK_MIB) -> None:
        self._mount_point = mount_point
        self._mib = mib
        self._ballast = mount_point / "ballast"
        self._image = mount_point.with_name(f"{mount_point.name}.ext4")
        self.file_system = ""
        self.mount_error = ""

    @property
    def is_mounted(self) -> bool:
        return bool(self.file_system)

    def __enter__(self) -> SmallDisk:
        self._mount_point.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as image:
            image.truncate(self._mib << 20)
        image_name, mount_point = str(self._image), str(self._mount_point)
        commands = {
            "ext4": [
                ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image_name],
                ["mount", "-o", "loop", image_name, mount_point],
            ],
            "tmpfs": [["mount", "-t", "tmpfs", "-o", f"size={self._mib}m", "tmpfs", mount_point]],
        }
        for file_system, steps in commands.items():
            try:
                for step in steps:
                    subprocess.run(step, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                self.mount_error = str(getattr(error, "stderr", "") or error).strip()
                continue
            self.file_system = file_system
            break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.is_mounted:
            subprocess.run(["umount", str(self._mount_point)], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)

    def fill(self) -> None:
        """Fill the disk to the last byte."""
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
        """Release the space that `fill` used."""
        self._ballast.unlink(missing_ok=True)


@dataclass
class Faults:
    """Injects faults. `counts` has the number of each kind."""

    served: Server
    relay: Relay
    disk: SmallDisk
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._generator = random.Random(self.seed)
        # Weight and action of each kind of fault.
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (3, self._kill),
            "restart": (1, self._restart),
            "freeze": (3, self._freeze),
            "reset all": (2, self._reset_all),
            "reset some": (3, self._reset_some),
            "cut off": (1, self._cut_off),
        }
        if self.disk.is_mounted:
            self._kinds["full disk"] = (2, self._fill_disk)
            self._kinds["kill on a full disk"] = (1, self._kill_on_full_disk)

    async def inject(self, seconds: float) -> None:
        """Inject one fault after the other for `seconds`. At the end none remains."""
        names, weights = list(self._kinds), [weight for weight, _ in self._kinds.values()]
        start_s = time.monotonic()
        while (elapsed_s := time.monotonic() - start_s) < seconds:
            [name] = self._generator.choices(names, weights)
            print_progress(f"{elapsed_s:7.1f} s  {name}")
            await self._kinds[name][1]()
            self.counts[name] += 1
            await self._pause(*PAUSE_S)

    async def kill_repeatedly(self, count: int) -> None:
        """Kill the broker `count` times, each time a moment after it is ready."""
        for number in range(1, count + 1):
            if number % 10 == 0:
                print_progress(f"           kill {number} of {count}")
            await self._pause(*PAUSE_S)
            await self._kill()
            self.counts["kill"] += 1

    async def _pause(self, min_s: float, max_s: float) -> None:
        """Sleep for a random time: it is part of the load, not a wait for a condition."""
        await asyncio.sleep(self._generator.uniform(min_s, max_s))

    async def _kill(self) -> None:
        self.served.kill()
        await self._pause(0, 0.5)
        await asyncio.to_thread(self.served.start)

    async def _restart(self) -> None:
        await asyncio.to_thread(self.served.restart)

    async def _freeze(self) -> None:
        """Stop the process for up to 5 s, which is longer than the timeout of the clients."""
        os.kill(self.served.pid, signal.SIGSTOP)
        try:
            await self._pause(0.1, 5)
        finally:
            os.kill(self.served.pid, signal.SIGCONT)

    async def _reset_all(self) -> None:
        self.relay.reset(self._generator, 1)

    async def _reset_some(self) -> None:
        for _ in range(self._generator.randrange(1, 6)):
            self.relay.reset(self._generator, 0.3)
            await self._pause(0, 0.2)

    async def _cut_off(self) -> None:
        self.relay.refuses_connections = True
        self.relay.reset(self._generator, 1)
        await self._pause(0.2, 2)
        self.relay.refuses_connections = False

    async def _fill_disk(self) -> None:
        await asyncio.to_thread(self.disk.fill)
        await self._pause(0.5, 3)
        self.disk.free()

    async def _kill_on_full_disk(self) -> None:
        """Kill the broker on a full disk.

        It may then start for reads only, or refuse to start. With free space it must start.
        """
        await asyncio.to_thread(self.disk.fill)
        await self._pause(0.1, 1)
        self.served.kill()
        try:
            await asyncio.to_thread(self.served.start)
        except StartFailed as error:
            is_sigbus = self.disk.file_system == "tmpfs" and error.exit_code == -signal.SIGBUS
            if error.exit_code != 1 and not is_sigbus:
                raise
            self.counts["start refused on a full disk"] += 1
        self.disk.free()
        if not self.served.is_alive:
            self.served.forget_exited()
            await asyncio.to_thread(self.served.start)


def print_progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
