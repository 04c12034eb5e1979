"""Run real brokers and save their stores and their exchanges with a client as fixtures.

    python -m tests.interop.capture [VERSION ...]

Each version runs twice with the same script of messages: once it is stopped cleanly, once killed.
What a client sees is recorded before the broker ends. The files of the broker are small, so that
the log rolls over, a consume queue has two files and the key index has several.
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
from tests.interop.observe import observe, old_client_exchange, run_exchanges
from tests.interop.remoting import Client
from tests.interop.script import LONG_GROUP, Script

SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 16 * 1024,
    "mappedFileSizeConsumeQueue": 30 * 20,
    "maxHashSlotNum": 100,
    "maxIndexNum": 120,
    # No checks during the run, and none at the stop, when 5.5.0 checks a last time.
    "transactionCheckInterval": 600_000,
    "transactionTimeOut": 3_600_000,
}
ARCHIVED = (
    "commitlog",
    "consumequeue",
    "index",
    "config",
    "checkpoint",
    "abort",
    "abort.bak",
    "lock",
)


def capture(version: str, shutdown: Shutdown, frames: dict[str, tuple[bytes, bytes]]) -> None:
    """Run a broker, save its store, and add its exchanges to `frames`."""
    with tempfile.TemporaryDirectory(prefix=f"rocketmq-{version}-") as scratch:
        rocketmq = ApacheRocketMQ(version, Path(scratch), SETTINGS)
        if version.startswith("5."):
            write_long_group(rocketmq.store)
        with (
            rocketmq,
            Client(rocketmq.address) as client,
            Client(rocketmq.namesrv_address) as namesrv,
        ):

            def save_exchange(name: str) -> None:
                frames.setdefault(name, (client.sent_frame, client.received_frame))

            def save_namesrv_exchange(name: str) -> None:
                frames.setdefault(name, (namesrv.sent_frame, namesrv.received_frame))

            script = Script(client, save_exchange)
            script.run()
            run_exchanges(client, namesrv, save_exchange, save_namesrv_exchange)
            frames.setdefault("route.old_client", old_client_exchange(rocketmq.namesrv_address))
            view = observe(client, script)
            if shutdown == "killed":
                rocketmq.kill()
            else:
                rocketmq.stop_broker()
            files = pack(rocketmq.store, FIXTURES / version / f"store-{shutdown}.tar.xz")
    origin = {"version": version, "ending": shutdown, "captured": time.strftime("%Y-%m-%d")}
    write_expected(
        FIXTURES / version / f"expected-{shutdown}.json",
        {**origin, "settings": SETTINGS, **view, "files": files},
    )


def write_long_group(store: Path) -> None:
    """Write a group whose name is longer than requests allow.

    5.5.0 uses its second record layout for topics of more than 127 characters. Requests allow
    group names of 120 characters, so no client can create a retry topic of more than 127.
    """
    config = store / "config"
    config.mkdir(parents=True)
    table = {LONG_GROUP: {"groupName": LONG_GROUP, "retryQueueNums": 1}}
    (config / "subscriptionGroup.json").write_text(_json({"subscriptionGroupTable": table}))


def pack(store: Path, archive: Path) -> list[list[object]]:
    """Write a reproducible archive, without times, owners and modes.

    Returns the name and the size of every file of the store, also of those left out.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    files: list[list[object]] = []
    with tarfile.open(archive, "w:xz", preset=9) as out:
        for path in sorted(store.rglob("*")):
            name = path.relative_to(store).as_posix()
            if not path.is_file():
                continue
            files.append([name, path.stat().st_size])
            if name.split("/")[0] in ARCHIVED:
                data = path.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
    return files


def write_expected(path: Path, view: dict[str, Any]) -> None:
    """Write JSON with one message, key or file per line, so that diffs are readable."""
    lines = ["{"]
    for name, value in view.items():
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
    directory = FIXTURES / version / "wire"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.hex"):
        old.unlink()
    for name, (request, response) in frames.items():
        (directory / f"{name}.hex").write_text(
            f"# RocketMQ {version}, JSON header, captured {time.strftime('%Y-%m-%d')} by "
            f"tests/interop/capture.py; > request, < response\n"
            f"> {_grouped(request)}\n< {_grouped(response)}\n"
        )


def _grouped(frame: bytes) -> str:
    """Return a frame in hex: length, serializer and header length, header, body."""
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    parts = (frame[:4], frame[4:8], frame[8:header_end], frame[header_end:])
    return " ".join(part.hex() for part in parts if part)


def main(versions: Iterable[str]) -> None:
    for version in versions:
        frames: dict[str, tuple[bytes, bytes]] = {}
        for shutdown in SHUTDOWNS:
            sys.stdout.write(f"{version}, {shutdown}\n")
            capture(version, shutdown, frames)
        write_frames(version, frames)


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
