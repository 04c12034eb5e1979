"""A relay between a client and real servers that changes their responses on the way.

    async with LyingRelay(server, lie) as relay:
        async with Producer(relay.namesrv_address, group="g") as producer: ...

`lie` is called with each frame that a server sends and returns the bytes that the client gets.
`random_lie` makes one from a seed: most frames stay as they are, so that a client gets far enough
to be lied to about everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Any

from tests.support.clients import Broker

Lie = Callable[[bytes], bytes]

_PREFIX = struct.Struct(">II")
_NUMBERS = ["-1", "", "x", "1e9", "9" * 30, str(2**63), str(2**31), "0x10", " 7", "NaN", "\u0661"]
_JSON_VALUES: list[Any] = [-1, 2**31 - 1, 2**63, 10**40, 1.5, None, "", "x", [], {}, True, "\u0000"]


class LyingRelay:
    """Listens before a name server and a broker on loopback."""

    def __init__(self, server: Broker, lie: Lie) -> None:
        self._server = server
        self._lie = lie
        self._listeners: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.namesrv_address = ""

    async def __aenter__(self) -> LyingRelay:
        self.address = await self._listen(self._server.address)
        self.namesrv_address = await self._listen(self._server.namesrv_address)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for listener in self._listeners:
            listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, target: str) -> str:
        host, _, port = target.rpartition(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # The end of a test cancels the task, which asyncio's streams would report as an error.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                from_server, to_server = await asyncio.open_connection(host, int(port))
                try:
                    await asyncio.gather(
                        self._relay_requests(reader, to_server),
                        self._relay_responses(from_server, writer),
                    )
                finally:
                    to_server.close()
                    writer.close()

        listener = await asyncio.start_server(relay, "127.0.0.1", 0)
        self._listeners.append(listener)
        return f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def _relay_requests(
        self, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter
    ) -> None:
        while chunk := await reader.read(65_536):
            to_server.write(chunk)
            await to_server.drain()
        to_server.close()

    async def _relay_responses(
        self, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            length = await from_server.readexactly(4)
            rest = await from_server.readexactly(int.from_bytes(length, "big"))
            # Clients must come back to the relay for the broker as well.
            header, body = split_frame(length + rest)
            body = body.replace(self._server.address.encode(), self.address.encode())
            writer.write(self._lie(join_frame(header, body)))
            await writer.drain()


def split_frame(frame: bytes) -> tuple[bytes, bytes]:
    """Return header and body of a frame."""
    _, mark = _PREFIX.unpack_from(frame)
    body_begin = 8 + (mark & 0xFFFFFF)
    return frame[8:body_begin], frame[body_begin:]


def join_frame(header: bytes, body: bytes) -> bytes:
    return _PREFIX.pack(4 + len(header) + len(body), len(header)) + header + body


# --- lies ----------------------------------------------------------------------------------------


def random_lie(seed: int, *, ratio: float = 0.3) -> Lie:
    """Return a lie that changes this part of the frames, differently for each seed."""
    rng = Random(seed)

    def lie(frame: bytes) -> bytes:
        return rng.choice(_LIES)(frame, rng) if rng.random() < ratio else frame

    return lie


def _change_field(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    content = json.loads(header)
    fields = content.get("extFields") or {}
    if not fields:
        return _change_header(frame, rng)
    name = rng.choice(sorted(fields))
    if rng.random() < 0.3:
        del fields[name]
    else:
        fields[name] = rng.choice([*_NUMBERS, *_JSON_VALUES])
    return join_frame(json.dumps(content).encode(), body)


def _change_header(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    content = json.loads(header)
    name = rng.choice(["code", "flag", "remark", "extFields", "version", "language", "opaque"])
    content[name] = rng.choice([*_JSON_VALUES, 0, 1, 17, 19, 20, 21, 22, 39, 220, 999_999])
    return join_frame(json.dumps(content).encode(), body)


def _change_json(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    try:
        content = json.loads(body)
    except ValueError:
        return _flip_bytes(frame, rng)
    return join_frame(header, json.dumps(_with_one_lie(content, rng)).encode())


def _with_one_lie(value: Any, rng: Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {key: item for key, item in value.items() if key != name}
        return {**value, name: _with_one_lie(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _with_one_lie(value[index], rng), *value[index:]]
    return rng.choice(_JSON_VALUES)


def _flip_bytes(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    changed = bytearray(body or header)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return join_frame(header, bytes(changed)) if body else join_frame(bytes(changed), b"")


def _change_record(frame: bytes, rng: Random) -> bytes:
    """Lie in one of the numbers at the begin of a stored record: sizes, offsets, flags."""
    header, body = split_frame(frame)
    if len(body) < 91:
        return _change_field(frame, rng)
    position = rng.choice([0, 4, 8, 12, 20, 28, 36, 84])
    value = rng.choice([0, 1, 90, 2**31 - 1, 2**32 - 1, len(body), len(body) - 1])
    return join_frame(header, body[:position] + struct.pack(">I", value) + body[position + 4 :])


def _cut_body(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    return join_frame(header, body[: rng.randint(0, len(body))])


def _extend_body(frame: bytes, rng: Random) -> bytes:
    header, body = split_frame(frame)
    return join_frame(header, body + rng.randbytes(rng.randint(1, 300)))


def _nest_deeply(frame: bytes, rng: Random) -> bytes:
    return join_frame(split_frame(frame)[0], b"[" * 100_000)


def _lie_about_lengths(frame: bytes, rng: Random) -> bytes:
    length, mark = _PREFIX.unpack_from(frame)
    lengths = (rng.choice([0, 3, length - 1, length + 1, 2**24, 2**31, 2**32 - 1]), mark)
    marks = (length, rng.choice([0, 2**24, 2**24 - 1, mark + 1, 0xFFFFFFFF]))
    return _PREFIX.pack(*rng.choice([lengths, marks])) + frame[8:]


def _answer_twice(frame: bytes, rng: Random) -> bytes:
    return frame + frame


def _answer_nothing(frame: bytes, rng: Random) -> bytes:
    return b""


def _answer_garbage(frame: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.randint(1, 200)) + frame


def _ask_instead(frame: bytes, rng: Random) -> bytes:
    """Send a request that nobody expects before the response."""
    code = rng.choice([39, 40, 220, 221, 307, 309, 326, 12_345])
    fields = {"consumerGroup": "g", "tranStateTableOffset": "0", "commitLogOffset": "0"}
    request = {"code": code, "flag": rng.choice([0, 2]), "opaque": 1, "extFields": fields}
    return join_frame(json.dumps(request).encode(), rng.randbytes(rng.randint(0, 200))) + frame


_LIES: list[Callable[[bytes, Random], bytes]] = [
    _change_field,
    _change_field,
    _change_field,
    _change_header,
    _change_json,
    _change_json,
    _change_json,
    _flip_bytes,
    _change_record,
    _change_record,
    _cut_body,
    _extend_body,
    _nest_deeply,
    _lie_about_lengths,
    _answer_twice,
    _answer_nothing,
    _answer_garbage,
    _ask_instead,
]
