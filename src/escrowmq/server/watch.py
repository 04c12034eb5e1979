"""Files that are read again when they change."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from escrowmq.errors import AccessRulesBroken

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0

_Mark = tuple[tuple[int, int, int], ...]


class Watch:
    """`renew` reads the files, or raises AccessRulesBroken: then what was read before still holds,
    and it is said once."""

    def __init__(self, what: str, files: Sequence[Path], renew: Callable[[], None]) -> None:
        self._what = what
        self._files = files
        self._renew = renew
        self._seen = self._mark()
        self.renewed = 0
        self.failed = 0
        self.is_broken = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._renew()
        except AccessRulesBroken as error:
            self.failed += 1
            self.is_broken = True
            log.error("%s changed and cannot be used, the old stay: %s", self._what, error)
        else:
            self.renewed += 1
            self.is_broken = False
            log.info("%s read again", self._what)

    def _mark(self) -> _Mark:
        return tuple(map(_mark_of, self._files))


def _mark_of(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
