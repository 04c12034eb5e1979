"""What `capture.py` kept of real brokers: stores, what clients saw of them, and frames.

`fixtures/README.md` says where every byte comes from.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any, Literal

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = ("5.5.0", "4.9.7")

Ending = Literal["clean", "killed"]  # how the broker that wrote the store came to its end
ENDINGS: tuple[Ending, ...] = ("clean", "killed")


def unpack_store(version: str, ending: Ending, directory: Path) -> Path:
    """Lay the store out at `<directory>/store`, where a harness looks for it."""
    store = directory / "store"
    with tarfile.open(FIXTURES / version / f"store-{ending}.tar.xz") as archive:
        for member in archive:
            target = store / member.name
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            data = archive.extractfile(member)
            assert data is not None, f"{member.name} is neither file nor folder"
            target.parent.mkdir(parents=True, exist_ok=True)
            # Written new, so that no file is old enough for a broker to clear it away.
            target.write_bytes(data.read())
    return store


def expected(version: str, ending: Ending) -> dict[str, Any]:
    """What a client saw through the wire just before the broker ended."""
    seen: dict[str, Any] = json.loads((FIXTURES / version / f"expected-{ending}.json").read_text())
    return seen


def shapes(version: str) -> dict[str, Any]:
    """The shapes of the responses to `conversation.py`, by request."""
    captured: dict[str, Any] = json.loads((FIXTURES / version / "shapes.json").read_text())
    assert captured.pop("origin")["rocketmq"] == version
    return captured


def exchanges(version: str) -> list[str]:
    return sorted(path.stem for path in (FIXTURES / version / "wire").glob("*.hex"))


def exchange(version: str, name: str) -> tuple[bytes, bytes]:
    """One request frame and the frame that answered it."""
    lines = (FIXTURES / version / "wire" / f"{name}.hex").read_text().splitlines()
    frames = {line[0]: bytes.fromhex(line[2:]) for line in lines if line[0] in "><"}
    return frames[">"], frames["<"]
