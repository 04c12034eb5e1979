"""The metrics of many brokers as one page, and how to get them: HTTP on loopback.

Every sample says by `node_id` whose it is, so samples of one name only have to be brought together
under one heading.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator
from typing import Final

from escrowmq.errors import NotSent
from escrowmq.secret import Secret

ANSWER_S: Final = 5.0
PAGE_BYTES_MAX: Final = 64 << 20


async def fetch(port: int, path: str, account: tuple[str, Secret] | None = None) -> tuple[int, str]:
    """Status and body of one answer. Raises NotSent."""
    head = f"GET {path} HTTP/1.0\r\n"
    if account is not None:
        shown = base64.b64encode(f"{account[0]}:{account[1].reveal()}".encode()).decode()
        head += f"Authorization: Basic {shown}\r\n"
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"{head}\r\n".encode())
                answer = await reader.read(PAGE_BYTES_MAX)
                while chunk := await reader.read(PAGE_BYTES_MAX):
                    answer += chunk
            finally:
                writer.close()
        status, _, body = answer.partition(b"\r\n\r\n")
        return int(status.split(b" ", 2)[1]), body.decode()
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        raise NotSent(f"port {port} does not answer {path}: {error!r}") from error


class Pages:
    """What several pages say, family by family."""

    def __init__(self) -> None:
        self._headings: dict[str, list[str]] = {}
        self._samples: dict[str, list[str]] = {}

    def add(self, lines: Iterable[str]) -> None:
        name = ""
        for line in lines:
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                heading = self._headings.setdefault(name, [])
                if len(heading) < 2:  # HELP and TYPE, of whoever came first
                    heading.append(line)
            elif name:
                self._samples.setdefault(name, []).append(line)

    def lines(self) -> Iterator[str]:
        for name, heading in self._headings.items():
            yield from heading
            yield from self._samples.get(name, ())
