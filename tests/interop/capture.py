"""Let real brokers write stores and answer requests, and keep what came out as fixtures.

    python -m tests.interop.capture [VERSION ...]

Each version runs twice on the same script of messages: once stopped cleanly, once killed.
What a client sees is written down before the broker ends. All files of the broker are small,
so that the log rolls over, a consume queue has two files and the key index has several.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.interop.apache import VERSIONS, ApacheRocketMQ
from tests.interop.fixtures import ENDINGS, FIXTURES, Ending
from tests.interop.remoting import (
    COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    PULL_NOT_FOUND,
    ROLLBACK,
    SUCCESS,
    Client,
    Record,
    Refused,
    Sent,
)

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
BODY_HEX_MAX = 64  # a longer body is named by its hash

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LONG_GROUP = "warehouse-" + "x" * 120  # with %RETRY% in front, more than one length byte can say
BODY_SIZES = (1, 10, 100, 500, 1024, 3000, 5000)
TAGS = ("TagA", "TagB", None, "中文tag", "")

QUEUES = {
    "orders": range(4),
    "payments": range(2),
    "%RETRY%billing": range(1),
    f"%RETRY%{LONG_GROUP}": range(1),
    SCHEDULE_TOPIC: (2, 17),
    HALF_TOPIC: range(1),
    OP_TOPIC: range(1),
    "OFFSET_MOVED_EVENT": range(1),
}
KEYS = (
    ("orders", "order-3"),
    ("orders", "customer-1"),
    ("orders", "größe"),
    ("payments", "payment-17"),
    ("payments", "common"),
    ("payments", "no-such-key"),
)
COMMITTED = (
    ("billing", "orders", 0, 3),
    ("billing", "orders", 1, 2),
    ("billing", "payments", 0, 33),
    ("audit", "orders", 3, 1),
)


class Script:
    """The messages, in order. `keep` puts an exchange aside as a wire fixture."""

    def __init__(self, client: Client, keep: Callable[[str], None]) -> None:
        self._client = client
        self._keep = keep
        self._count = 0
        self.unique_keys: list[tuple[str, str]] = []
        self.refusals: dict[str, str] = {}

    def run(self) -> None:
        self._create()
        self._delayed()
        self._orders()
        self._payments()
        self._special_bodies()
        self._retries()
        self._transactions()
        self._committed_offsets()
        self._await("the delayed message", "orders", 2, self._orders_on_queue_2 + 1)

    def _create(self) -> None:
        self._client.create_topic("orders", queues=4)
        self._keep("create_topic")
        self._client.create_topic("payments", queues=2)
        self._client.create_group("billing")
        self._keep("create_group")
        self._client.create_group("audit")

    def _delayed(self) -> None:
        self._send("orders", b"after ten seconds", {"DELAY": "3", "TAGS": "late"}, queue_id=2)
        self._keep("send.delayed")
        self._send("orders", b"after two hours", {"DELAY": "18"}, queue_id=2)

    def _orders(self) -> None:
        for number in range(21):
            properties = {"KEYS": f"order-{number} customer-{number % 3}", "colour": "grün"}
            tag = TAGS[number % len(TAGS)]
            if tag is not None:
                properties["TAGS"] = tag
            size = BODY_SIZES[number % len(BODY_SIZES)]
            body = (f"order {number}; ".encode() * size)[:size]
            self._send("orders", body, properties, queue_id=number % 4)
            if number == 0:
                self._keep("send")
        self._orders_on_queue_2 = self._client.max_offset("orders", 2)

    def _payments(self) -> None:
        for number in range(33):
            properties = {"KEYS": f"payment-{number} common", "TAGS": f"T{number % 2}"}
            self._send("payments", f"payment {number}".encode(), properties)
            if number % 10 == 9:
                time.sleep(0.02)  # so that a search by time has something to tell apart

    def _special_bodies(self) -> None:
        text = "Überweisung nach 東京 "
        properties = {"KEYS": "größe", "emoji": "\U0001f600"}
        self._send("orders", text.encode(), properties, queue_id=3, flag=7)
        squeezed = zlib.compress((text * 300).encode(), 5)
        self._send("orders", squeezed, {"TAGS": "zlib"}, queue_id=3, sys_flag=1)
        self._send("orders", squeezed, {"TAGS": "zlib"}, queue_id=3, sys_flag=0x301)

    def _retries(self) -> None:
        properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0" * 32}
        self._send("%RETRY%billing", b"again", properties, reconsume_times=1)
        try:
            self._send(f"%RETRY%{LONG_GROUP}", b"long topic", properties, reconsume_times=1)
        except Refused as error:
            self.refusals["long retry topic"] = str(error)
            self._keep("send.refused")

    def _transactions(self) -> None:
        halves = [self._send_half(name) for name in ("committed", "rolled back", "open")]
        self._keep("send.half")
        self._end(halves[0], COMMIT, "end_transaction.commit")
        self._end(halves[1], ROLLBACK, "end_transaction.rollback")
        # 5.x gathers ops for seconds, and a stop does not wait for them. 4.x has no settings
        # for the op topic until later, but tells how long its queue is.
        self._await("the ops", OP_TOPIC, 0, 1 if self._ops_are_gathered() else 2)

    def _ops_are_gathered(self) -> bool:
        answer = self._client.pull(OP_TOPIC, 0, 0)
        return answer.code in (SUCCESS, PULL_NOT_FOUND)

    def _send_half(self, name: str) -> Sent:
        unique = self._next_unique_key()
        properties = {"UNIQ_KEY": unique, "KEYS": f"half-{len(name)}", "TAGS": "tx", "user": "ü"}
        self.unique_keys += [(HALF_TOPIC, unique), ("orders", unique)]
        return self._client.send_half("orders", f"half, {name}".encode(), properties, queue_id=1)

    def _end(self, half: Sent, verdict: int, name: str) -> None:
        answer = self._client.end_transaction(half, verdict, topic="orders")
        assert answer.code == SUCCESS, answer
        self._keep(name)

    def _committed_offsets(self) -> None:
        for group, topic, queue_id, queue_offset in COMMITTED:
            self._client.commit_offset(group, topic, queue_id, queue_offset)
        self._keep("update_offset")

    def _send(
        self,
        topic: str,
        body: bytes,
        properties: dict[str, str],
        *,
        queue_id: int = 0,
        sys_flag: int = 0,
        flag: int = 0,
        reconsume_times: int = 0,
    ) -> None:
        unique = self._next_unique_key()
        self.unique_keys.append((topic, unique))
        self._client.send(
            topic,
            body,
            {**properties, "UNIQ_KEY": unique, "WAIT": "true"},
            queue_id=queue_id,
            sys_flag=sys_flag,
            flag=flag,
            reconsume_times=reconsume_times,
        )

    def _next_unique_key(self) -> str:
        self._count += 1
        return f"7F000001{self._count:024X}"

    def _await(self, what: str, topic: str, queue_id: int, count: int) -> None:
        deadline = time.monotonic() + 40
        while self._client.max_offset(topic, queue_id) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come")
            time.sleep(0.1)


# What a client sees.


def observe(client: Client, script: Script) -> dict[str, Any]:
    return {
        "storeHost": client.address,
        "refusals": script.refusals,
        "queues": [
            queue_view(client, topic, queue_id)
            for topic, queue_ids in QUEUES.items()
            for queue_id in queue_ids
        ],
        "keys": [key_view(client, topic, key, unique=False) for topic, key in KEYS]
        + [key_view(client, topic, key, unique=True) for topic, key in script.unique_keys[::9]]
        + [key_view(client, topic, key, unique=True) for topic, key in script.unique_keys[-6:]],
        "committed": [
            {
                "group": group,
                "topic": topic,
                "queueId": queue_id,
                "offset": client.committed_offset(group, topic, queue_id),
            }
            for group, topic, queue_id, _ in COMMITTED
        ],
    }


def queue_view(client: Client, topic: str, queue_id: int) -> dict[str, Any]:
    minimum, maximum = client.min_offset(topic, queue_id), client.max_offset(topic, queue_id)
    view: dict[str, Any] = {
        "topic": topic,
        "queueId": queue_id,
        "minOffset": minimum,
        "maxOffset": maximum,
    }
    try:
        records = client.pull_all(topic, queue_id)
    except Refused as error:
        return {**view, "refused": str(error)}
    for record in records:
        assert (record.topic, record.queue_id) == (topic, queue_id)
        assert record.store_host == client.address
        viewed = client.view_by_id(f"{record.log_offset:032X}")
        assert viewed == record, "pulled and viewed by id, a message must be the same"
    return {
        **view,
        "searches": [
            [timestamp_ms, client.search_offset(topic, queue_id, timestamp_ms=timestamp_ms)]
            for timestamp_ms in search_times(records)
        ],
        "messages": [message_view(record) for record in records],
    }


def search_times(records: list[Record]) -> list[int]:
    if not records:
        return [0]
    stored = [record.stored_ms for record in records]
    middle = stored[len(stored) // 2]
    around = (stored[0] - 1, stored[0], middle, middle + 1, stored[-1], stored[-1] + 1)
    return sorted({0, *around, stored[-1] + 3_600_000})


def message_view(record: Record) -> dict[str, Any]:
    view = record._asdict()
    body = view.pop("body")
    for told_once in ("topic", "queue_id", "store_host", "raw_properties"):
        del view[told_once]
    view["bodyBytes"] = len(body)
    if len(body) <= BODY_HEX_MAX:
        view["bodyHex"] = body.hex()
    else:
        view["bodySha256"] = hashlib.sha256(body).hexdigest()
    view["properties"] = record.properties
    view["tags"] = record.properties.get("TAGS")
    return {_camel(name): value for name, value in view.items()}


def key_view(client: Client, topic: str, key: str, *, unique: bool) -> dict[str, Any]:
    found = client.query_by_key(topic, key, unique=unique)
    offsets = [record.log_offset for record in found]
    return {"topic": topic, "key": key, "unique": unique, "logOffsets": offsets}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


# The rest of the wire.


def ask_around(
    client: Client,
    namesrv: Client,
    keep: Callable[[str], None],
    keep_namesrv: Callable[[str], None],
) -> None:
    """One exchange of each kind.

    They leave nothing behind, but that 4.x records a pull past the end in a topic of its own.
    """
    namesrv.route("orders")
    keep_namesrv("route")
    namesrv.route("no-such-topic")
    keep_namesrv("route.unknown_topic")
    client.heartbeat("127.0.0.1@interop", producer_groups=("interop-producers",))
    keep("heartbeat")
    client.pull("orders", 0, 0, most=1)
    keep("pull.found")
    client.pull("orders", 0, client.max_offset("orders", 0))
    keep("pull.not_found")
    client.pull("orders", 0, 1_000)
    keep("pull.offset_moved")
    client.pull("orders", 0, 0, subscription="no-such-tag")
    keep("pull.no_match")
    client.pull("no-such-topic", 0, 0)
    keep("pull.unknown_topic")
    client.committed_offset("billing", "orders", 0)
    keep("query_offset")
    client.committed_offset("nobody", "payments", 0)
    keep("query_offset.unknown_group")
    client.max_offset("orders", 0)
    keep("max_offset")
    client.min_offset("orders", 0)
    keep("min_offset")
    client.search_offset("orders", 0, timestamp_ms=0)
    keep("search_offset")
    client.query_by_key("orders", "order-0")
    keep("query_message")
    client.query_by_key("orders", "no-such-key")
    keep("query_message.not_found")
    client.request(33, {"offset": 0})
    keep("view_message")
    client.request(33, {"offset": 3})
    keep("view_message.not_found")
    client.request(9_999)
    keep("unsupported")


# Files.


def capture(version: str, ending: Ending, frames: dict[str, tuple[bytes, bytes]]) -> None:
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
        for ending in ENDINGS:
            sys.stdout.write(f"{version}, {ending}\n")
            capture(version, ending, frames)
        write_frames(version, frames)


if __name__ == "__main__":
    main(sys.argv[1:] or VERSIONS)
