"""Let real brokers write stores and answer requests, and keep what came out as fixtures.

    python -m tests.interop.capture [VERSION ...]

Each version runs twice on the same script of messages: once stopped cleanly, once killed.
What a client sees is written down before the broker ends. All files of the broker are small,
so that the log rolls over, a consume queue has two files and the key index has several.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.interop.apache import ApacheRocketMQ
from tests.interop.fixtures import FIXTURES, SHUTDOWNS, Shutdown
from tests.interop.jars import VERSIONS
from tests.interop.observe import ask_around, ask_as_old_client, observe
from tests.interop.remoting import Client
from tests.interop.script import LONG_GROUP, Script

SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 16 * 1024,
    "mappedFileSizeConsumeQueue": 30 * 20,
    "maxHashSlotNum": 100,
    "maxIndexNum": 120,
    # No check-back while we look, nor at the stop: 5.x makes one last round there.
    "transactionCheckInterval": 600_000,
    "transactionTimeOut": 3_600_000,
}
KEPT = ("commitlog", "consumequeue", "index", "config", "checkpoint", "abort", "abort.bak", "lock")


def capture(version: str, ending: Shutdown, frames: dict[str, tuple[bytes, bytes]]) -> None:
    with tempfile.TemporaryDirectory(prefix=f"rocketmq-{version}-") as scratch:
        rocketmq = ApacheRocketMQ(version, Path(scratch), SETTINGS)
        if version.startswith("5."):
            lay_long_group(rocketmq.store)
        with rocketmq, Client(rocketmq.address) as client, Client(rocketmq.namesrv_address) as ns:

            def keep(name: str) -> None:
                frames.setdefault(name, (client.sent_frame, client.received_frame))

            def keep_namesrv(name: str) -> None:
                frames.setdefault(name, (ns.sent_frame, ns.received_frame))

            script = Script(client, keep)
            script.run()
            ask_around(client, ns, keep, keep_namesrv)
            frames.setdefault("route.old_client", ask_as_old_client(rocketmq.namesrv_address))
            seen = observe(client, script)
            if ending == "killed":
                rocketmq.kill()
            else:
                rocketmq.stop_broker()
            files = pack(rocketmq.store, FIXTURES / version / f"store-{ending}.tar.xz")
    origin = {"version": version, "ending": ending, "captured": time.strftime("%Y-%m-%d")}
    write_expected(
        FIXTURES / version / f"expected-{ending}.json",
        {**origin, "settings": SETTINGS, **seen, "files": files},
    )


def lay_long_group(store: Path) -> None:
    """A group of a length that 5.x stores but does not let anyone create.

    With a topic of more than 127 characters it writes its second message layout. Requests
    allow groups of 120, so the longest retry topic a client can reach has just 127.
    """
    config = store / "config"
    config.mkdir(parents=True)
    table = {LONG_GROUP: {"groupName": LONG_GROUP, "retryQueueNums": 1}}
    (config / "subscriptionGroup.json").write_text(_json({"subscriptionGroupTable": table}))


def pack(store: Path, archive: Path) -> list[list[object]]:
    """Same files, same bytes: no times, owners or modes. Returns name and size of all files."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = []
    with tarfile.open(archive, "w:xz", preset=9) as out:
        for path in sorted(store.rglob("*")):
            name = path.relative_to(store).as_posix()
            if not path.is_file():
                continue
            files.append([name, path.stat().st_size])
            if name.split("/")[0] in KEPT:
                data = path.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    return [list(file) for file in files]


def write_expected(path: Path, seen: dict[str, Any]) -> None:
    """JSON with one message, key or file a line, so that a difference can be read."""
    lines = ["{"]
    for name, value in seen.items():
        if name == "queues":
            lines += ['"queues": [', ",\n".join(_queue_lines(value)), "],"]
        elif isinstance(value, list):
            lines += [f'"{name}": [', ",\n".join(map(_json, value)), "],"]
        else:
            lines.append(f'"{name}": {_json(value)},')
    lines[-1] = lines[-1].removesuffix(",")
    path.write_text("\n".join([*lines, "}"]) + "\n")


def _queue_lines(queues: Iterable[dict[str, Any]]) -> Iterable[str]:
    for queue in queues:
        if "messages" not in queue:
            yield _json(queue)
            continue
        head = _json({name: value for name, value in queue.items() if name != "messages"})
        messages = ",\n  ".join(map(_json, queue["messages"]))
        yield f'{head[:-1]},"messages":[\n  {messages}\n]}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_frames(version: str, frames: dict[str, tuple[bytes, bytes]]) -> None:
    folder = FIXTURES / version / "wire"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.hex"):
        old.unlink()
    for name, (request, response) in frames.items():
        (folder / f"{name}.hex").write_text(
            f"# RocketMQ {version}, JSON header, captured {time.strftime('%Y-%m-%d')} by "
            f"tests/interop/capture.py; > request, < answer\n"
            f"> {_grouped(request)}\n< {_grouped(response)}\n"
        )


def _grouped(frame: bytes) -> str:
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    parts = (frame[:4], frame[4:8], frame[8:header_end], frame[header_end:])
    return " ".join(part.hex() for part in parts if part)


def main(versions: Iterable[str]) -> None:
    for version in versions:
        frames: dict[str, tuple[bytes, bytes]] = {}
        for ending in SHUTDOWNS:
            sys.stdout.write(f"{version}, {ending}\n")
            capture(version, ending, frames)
        write_frames(version, frames)


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
