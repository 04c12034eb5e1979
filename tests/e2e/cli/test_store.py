"""`escrowmq store check` and `store dump` as a user runs them: exit codes and output."""

from __future__ import annotations

import json
import subprocess
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from escrowmq.config import StoreConfig
from escrowmq.message import record as sysflag
from escrowmq.message.compression import compress_body
from escrowmq.store.disk import RealDisk
from tests.support.brokers import COMMAND, Server
from tests.support.commands import CommandResult
from tests.support.commands import run as run_command
from tests.support.stores import HOST, NOW_MS, fill, open_store, properties, sample

pytestmark = pytest.mark.slow

RECORDS = 40
SETTINGS = StoreConfig(segment_bytes=8192, queue_file_bytes=200, index_slots=50, index_entries=200)


def run(*arguments: str | Path) -> CommandResult:
    return run_command(*map(str, arguments))


def dump(*arguments: str | Path) -> list[Any]:
    """Return the records that `store dump --json` prints."""
    result = run("store", "dump", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    return [json.loads(line) for line in result.lines]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that no test changes."""
    return create_store(tmp_path_factory.mktemp("intact") / "store")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Return a store with a wrong byte in its second record."""
    path = create_store(tmp_path / "store")
    first = dump(path, "--limit", "1")[0]
    with (path / f"commitlog/{0:020d}").open("r+b") as file:
        file.seek(first["size"] + 88)
        file.write(b"X")
    return path


def create_store(path: Path) -> Path:
    store = open_store(RealDisk(path), SETTINGS)
    fill(store, range(RECORDS))
    store.close()
    return path


# --- check -----------------------------------------------------------------------------------


def test_a_clean_store_is_reported_with_exit_code_0(intact: Path) -> None:
    result = run("store", "check", intact)
    assert (result.code, result.err) == (0, "")
    assert f"{RECORDS} records" in result.out
    assert result.out.rstrip().endswith("clean")
    assert len(result.lines) == 1


def test_damage_is_located_and_reported_with_exit_code_1(damaged: Path) -> None:
    result = run("store", "check", damaged)
    assert result.code == 1
    assert result.out.startswith(f"DAMAGE commitlog/{0:020d} at byte ")
    assert "checksum" in result.out
    assert "DAMAGED in 1 places" in result.out


def test_a_report_in_json_lists_the_findings(intact: Path, damaged: Path) -> None:
    report = run("store", "check", intact, "--json").json
    assert report["clean"] is True
    assert report["findings"] == []
    assert (report["records"], report["keys"]) == (RECORDS, 3 * RECORDS)
    result = run("store", "check", damaged, "--json")
    assert result.code == 1
    report = result.json
    assert report["clean"] is False
    [finding] = report["findings"]
    assert finding["severity"] == "damage"
    assert finding["where"] == f"commitlog/{0:020d}"
    assert finding["position"] > 0


def test_a_directory_without_a_store_is_refused_with_one_line_and_exit_code_2(
    tmp_path: Path,
) -> None:
    for directory, reason in ((tmp_path / "none", "no such directory"), (tmp_path, "not a store")):
        for command in ("check", "dump"):
            result = run("store", command, directory)
            assert (result.code, result.out) == (2, "")
            assert result.err.startswith(f"escrowmq: {directory}: {reason}")
            assert len(result.err.splitlines()) == 1


def test_the_store_of_a_running_broker_can_be_checked_and_dumped(tmp_path: Path) -> None:
    """Messages are sent all the time; what a check sees is never damage."""
    with Server(tmp_path) as server, server.client() as client:
        is_over = threading.Event()

        def send_messages() -> None:
            while not is_over.is_set():
                client.send("orders", b"x" * 500)

        sender = threading.Thread(target=send_messages)
        sender.start()
        try:
            records: list[int] = []
            while len(set(records)) < 3:  # until several checkpoints were made
                result = run("store", "check", server.data, "--json")
                assert (result.code, result.err) == (0, "")
                assert result.json["is_in_use"] is True
                assert [f for f in result.json["findings"] if f["severity"] == "damage"] == []
                records.append(result.json["records"])
            result = run("store", "check", server.data)
            assert result.lines[-1].startswith("a broker is running on it: ")
            assert run("store", "dump", server.data, "--limit", "3").code == 0
        finally:
            is_over.set()
            sender.join()
    result = run("store", "check", server.data)
    assert (result.code, result.lines[-1].endswith("clean")) == (0, True)


# --- dump ------------------------------------------------------------------------------------


def test_a_dump_shows_every_record_in_order(intact: Path) -> None:
    dumped = dump(intact)
    assert [record["unique_key"] for record in dumped] == [f"U{n:04d}" for n in range(RECORDS)]
    first = dumped[0]
    assert first["stored"] == "2023-11-14T22:13:20.000Z"
    assert (first["topic"], first["queue"], first["queue_offset"]) == ("T0", 0, 0)
    assert (first["tags"], first["keys"]) == ("tag0", "k0 all")
    assert first["body"] == "body 0 "
    assert first["born_host"] == "127.0.0.1:10911"


def test_options_of_a_dump_select_records(intact: Path) -> None:
    records = dump(intact)
    assert dump(intact, "--topic", "T1") == [r for r in records if r["topic"] == "T1"]
    assert dump(intact, "--topic", "T1", "--queue", "0") == []
    assert [r["keys"] for r in dump(intact, "--key", "k7")] == ["k7 all"]
    assert [r["keys"] for r in dump(intact, "--key", "U0007")] == ["k7 all"]
    assert dump(intact, "--limit", "3") == records[:3]
    assert dump(intact, "--from", str(records[9]["log_offset"])) == records[9:]
    assert dump(intact, "--from", str(records[9]["log_offset"] - 1)) == records[9:]
    assert dump(intact, "--from", "99999999") == []
    assert "body" not in dump(intact, "--limit", "1", "--no-body")[0]


def test_a_dump_prints_a_line_for_each_record(intact: Path) -> None:
    result = run("store", "dump", intact, "--limit", "2", "--no-body")
    words = result.lines[0].split("  ")
    assert [word.strip() for word in words if word][:6] == [
        "0",
        "2023-11-14T22:13:20.000Z",
        "T0/0 #0",
        "tags=tag0",
        "keys=k0 all",
        "unique=U0000",
    ]
    assert len(result.lines) == 2
    assert "body" not in result.out


def test_bodies_are_printed_as_text_or_hex_without_control_characters(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path), SETTINGS)
    zlib = sysflag.with_compression(0, sysflag.COMPRESSION_ZLIB)
    bodies = {
        b"plain": 0,
        b"two\nlines": sysflag.TRANSACTION_COMMIT,
        b"\x1b[2J": 0,
        b"\xff\x00": sysflag.TRANSACTION_PREPARED,
        compress_body(b"packed"): zlib,
        b"not zlib": zlib,
        b"long " * 100: 0,
    }
    control_character = properties(TAGS="\x1b[31m")
    for body, sys_flag in bodies.items():
        record = sample(
            0, body=body, sys_flag=sys_flag, properties=control_character, born_host=HOST
        )
        store.append([record], now_ms=NOW_MS)
    store.close()
    text = run("store", "dump", tmp_path).out
    assert "\x1b" not in text
    printed_bodies = [line.strip() for line in text.splitlines()[1::2]]
    assert printed_bodies[:6] == [
        *("plain", r"two\nlines", "hex 1b5b324a", "hex ff00", "packed", "not zlib")
    ]
    assert printed_bodies[6].endswith("…")
    record_lines = text.splitlines()[::2]
    assert "commit" in record_lines[1]
    assert "prepared" in record_lines[3]
    assert "compressed" in record_lines[4]
    dumped = dump(tmp_path)
    assert dumped[3]["body_hex"] == "ff00"
    assert dumped[6]["body"] == "long " * 100


def test_a_dump_continues_after_damage(damaged: Path) -> None:
    result = run("store", "dump", damaged)
    assert result.code == 0
    assert "NO RECORD: the body's checksum is wrong" in result.out
    dumped = dump(damaged)
    assert len(dumped) == RECORDS
    assert [record.get("bad") for record in dumped[:3]] == [
        None,
        "the body's checksum is wrong",
        None,
    ]


def test_a_closed_pipe_is_not_an_error(intact: Path) -> None:
    for command in ("dump", "check"):
        # `true` reads nothing; the pipe is closed before or while the command writes.
        script = f"{COMMAND} store {command} {intact} | true; echo ${{PIPESTATUS[0]}}"
        result = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert (result.stdout, result.stderr) == ("0\n", "")


# --- the command itself ----------------------------------------------------------------------


def test_the_command_prints_its_version() -> None:
    assert run("--version").out == f"escrowmq, version {version('escrowmq')}\n"


def test_a_wrong_command_line_exits_with_2() -> None:
    result = run("store", "chekc", "x")
    assert result.code == 2
    assert "No such command" in result.err
