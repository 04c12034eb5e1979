"""Stores and frames of real brokers, captured by `capture.py`, and what their clients saw.

`fixtures/README.md` describes where they come from.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any, Literal

from escrowmq.remoting.frame import Frame, FrameDecoder

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = ("5.5.0", "4.9.7")

Shutdown = Literal["clean", "killed"]  # how the broker that wrote the store ended
SHUTDOWNS: tuple[Shutdown, ...] = ("clean", "killed")


def unpack_store(version: str, shutdown: Shutdown, directory: Path) -> Path:
    """Unpack a captured store to `<directory>/store`, where `ApacheRocketMQ` expects it."""
    store = directory / "store"
    with tarfile.open(FIXTURES / version / f"store-{shutdown}.tar.xz") as archive:
        for member in archive:
            target = store / member.name
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            data = archive.extractfile(member)
            assert data is not None, f"{member.name} is neither a file nor a directory"
            target.parent.mkdir(parents=True, exist_ok=True)
            # The files get the current time: a broker deletes files that are too old.
            target.write_bytes(data.read())
    return store


def expected(version: str, shutdown: Shutdown) -> dict[str, Any]:
    """Return what a client saw just before the broker ended."""
    view: dict[str, Any] = json.loads(
        (FIXTURES / version / f"expected-{shutdown}.json").read_text()
    )
    return view


def shapes(version: str) -> dict[str, Any]:
    """The shapes of the responses to `conversation.py`, by request."""
    captured: dict[str, Any] = json.loads((FIXTURES / version / "shapes.json").read_text())
    assert captured.pop("origin")["rocketmq"] == version
    return captured


def exchanges(version: str) -> list[str]:
    """Return the names of the captured exchanges."""
    return sorted(path.stem for path in (FIXTURES / version / "wire").glob("*.hex"))


def exchange(version: str, name: str) -> tuple[bytes, bytes]:
    """Return a captured request frame and its response frame."""
    lines = (FIXTURES / version / "wire" / f"{name}.hex").read_text().splitlines()
    frames = {line[0]: bytes.fromhex(line[2:]) for line in lines if line[0] in "><"}
    return frames[">"], frames["<"]


def single_frame(data: bytes) -> Frame:
    """Return the only frame in the data, decoded by our code."""
    decoder = FrameDecoder(Frame)
    decoder.receive(data)
    [frame] = decoder.frames()
    assert decoder.buffered_bytes == 0
    return frame
