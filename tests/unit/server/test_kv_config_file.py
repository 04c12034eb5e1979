"""The file with the key-value settings of a name server: what is answered is durable."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from escrowmq.client.connection import ClientConnection
from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.clock import SystemClock
from escrowmq.config import Config, NamesrvConfig, StoreConfig
from escrowmq.errors import ConfigError, StoreError, StoreFailed
from escrowmq.metrics import Registry
from escrowmq.namesrv.name_server import KvConfig, encode_kv_config_in_slices
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import KvConfigKey, PutKvConfig
from escrowmq.server import namesrv
from escrowmq.server.connection_limits import MemoryWatermark
from escrowmq.server.live_config import LiveConfig
from escrowmq.server.namesrv import KV_CONFIG_PATH, KvConfigFile, serve_name_server
from escrowmq.server.security import AccessControl
from escrowmq.sliced_work import run_to_end
from escrowmq.store.disk import replace_file
from escrowmq.testing import MemoryDisk
from tests.support.waiting import wait_until_async


class SlowDisk(MemoryDisk):
    """Lets renames wait until `may_rename` is set, and then fails them if `fails` is True."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_rename = threading.Event()
        self.fails = False
        self.renames = 0

    def rename(self, old: str, new: str) -> None:
        self.renames += 1
        assert self.may_rename.wait(30)
        if self.fails:
            raise StoreFailed("no rename")
        super().rename(old, new)


class Results:
    """What the callbacks of changes were called with."""

    def __init__(self, file: KvConfigFile) -> None:
        self._file = file
        self.errors: dict[str, StoreError | None] = {}

    def put(self, key: str, value: str) -> None:
        self._file.settings.put("space", key, value)

        def note(error: StoreError | None) -> None:
            self.errors[key] = error

        self._file.when_saved(note)


async def test_a_change_is_answered_when_it_is_durable_and_not_before() -> None:
    disk = SlowDisk()
    file = KvConfigFile(disk)
    results = Results(file)
    results.put("colour", "red")
    await wait_until_async(lambda: disk.renames == 1)  # the loop goes on while the disk is slow
    assert results.errors == {}
    assert not disk.exists(KV_CONFIG_PATH)
    disk.may_rename.set()
    await file.close()
    assert results.errors == {"colour": None}
    assert KvConfigFile(disk).settings.get("space", "colour") == "red"


async def test_changes_that_are_made_during_a_save_are_saved_together() -> None:
    disk = SlowDisk()
    file = KvConfigFile(disk)
    results = Results(file)
    for number in range(100):
        results.put(f"key{number}", "v")
    disk.may_rename.set()
    await file.close()
    assert results.errors == {f"key{number}": None for number in range(100)}
    assert disk.renames == 2
    assert KvConfigFile(disk).settings.count == 100


async def test_a_failed_save_undoes_every_change_since_the_last_one() -> None:
    disk = SlowDisk()
    disk.may_rename.set()
    file = KvConfigFile(disk)
    results = Results(file)
    results.put("colour", "red")
    await wait_until_async(lambda: "colour" in results.errors)
    disk.may_rename.clear()
    disk.fails = True
    results.put("colour", "blue")
    results.put("size", "large")  # waits for the save of the other one
    disk.may_rename.set()
    await file.close()
    assert {key: str(error) for key, error in results.errors.items()} == {
        "colour": "no rename",
        "size": "no rename",
    }
    assert file.settings.namespace("space") == {"colour": "red"}
    assert KvConfigFile(disk).settings.namespace("space") == {"colour": "red"}


async def test_a_save_without_memory_does_not_let_its_client_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = KvConfigFile(MemoryDisk())

    def dump() -> dict[str, object]:
        raise MemoryError("no memory")

    results = Results(file)
    monkeypatch.setattr(file.settings, "dump", dump)
    results.put("colour", "red")
    await file.close()
    assert isinstance(results.errors["colour"], StoreFailed)
    assert file.settings.get("space", "colour") is None


async def test_an_invalid_kv_config_file_is_refused() -> None:
    disk = MemoryDisk()
    disk.create(KV_CONFIG_PATH, 3).write_at(0, b"{x}")
    with pytest.raises(ConfigError, match="kvConfig"):
        KvConfigFile(disk)


@pytest.mark.parametrize("counts", [(), (1,), (40,), (3, 16, 17)])
def test_settings_are_encoded_in_slices_as_they_are_at_once(counts: tuple[int, ...]) -> None:
    settings = KvConfig()
    for namespace, count in enumerate(counts):
        for key in range(count):
            settings.put(f'n"{namespace}', f"k\n{key}", "välue")
    content = settings.dump()
    encoded = b"".join(run_to_end(encode_kv_config_in_slices(content)))
    assert encoded == msgspec.json.encode(content)


# --- requests ------------------------------------------------------------------------------------

PUT = RequestCode.PUT_KV_CONFIG
COLOUR = PutKvConfig(namespace="space", key="colour", value="red")


class NameServerBench:
    """A name server on loopback whose settings are written when `may_write` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_write = threading.Event(), threading.Event()
        self.memory = ClientMemory()

        def replace_slowly(*arguments: Any) -> None:
            self.has_begun.set()
            if not self.may_write.wait(20):
                raise StoreFailed("the disk hangs")
            replace_file(*arguments)

        monkeypatch.setattr(namesrv, "replace_file", replace_slowly)

    @contextlib.asynccontextmanager
    async def serving(self, directory: Path) -> AsyncIterator[str]:
        config = Config(
            store=StoreConfig(root_dir=directory), namesrv=NamesrvConfig(namesrv_port=0)
        )
        async with serve_name_server(
            SystemClock(),
            AccessControl(config),
            Registry(),
            LiveConfig(config),
            asyncio.Event(),
            MemoryWatermark(self.memory),
        ) as address:
            yield address


async def connect(address: str) -> ClientConnection:
    return await ClientConnection.connect(address, lambda connection, request: None)


async def test_a_slow_disk_delays_only_the_client_that_changes_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NameServerBench(monkeypatch)
    async with bench.serving(tmp_path) as address:
        changing, other = await connect(address), await connect(address)
        change = asyncio.create_task(changing.call(PUT, COLOUR, timeout_s=30))
        await wait_until_async(bench.has_begun.is_set)
        clusters = await other.call(RequestCode.GET_BROKER_CLUSTER_INFO, timeout_s=30)
        assert clusters.code == ResponseCode.SUCCESS
        assert not change.done()
        bench.may_write.set()
        assert (await change).code == ResponseCode.SUCCESS
        assert bench.memory.bytes_for(MemoryUse.RESULTS) == 0
        key = KvConfigKey(namespace="space", key="nothing")
        reply = await changing.call(RequestCode.DELETE_KV_CONFIG, key, timeout_s=30)
        assert reply.code == ResponseCode.SUCCESS
        for connection in (changing, other):
            connection.close()


async def test_changes_that_wait_for_a_disk_that_hangs_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NameServerBench(monkeypatch)
    async with bench.serving(tmp_path) as address:
        client = await connect(address)
        changes = [asyncio.create_task(client.call(PUT, COLOUR, timeout_s=30)) for _ in range(3)]
        await wait_until_async(lambda: bench.memory.bytes_for(MemoryUse.RESULTS) >= 6_000)
        bench.memory.limits = MemoryLimits(connection_max=bench.memory.total, hard_max=1 << 30)
        refused = await client.call(PUT, COLOUR, timeout_s=30)
        assert refused.code == ResponseCode.SYSTEM_BUSY
        bench.may_write.set()
        assert {(await change).code for change in changes} == {ResponseCode.SUCCESS}
        client.close()


async def test_a_name_server_that_stops_saves_what_it_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = NameServerBench(monkeypatch)
    async with bench.serving(tmp_path) as address:
        client = await connect(address)
        change = asyncio.create_task(client.call(PUT, COLOUR, timeout_s=30))
        await wait_until_async(lambda: bench.memory.bytes_for(MemoryUse.RESULTS))
        asyncio.get_running_loop().call_soon(bench.may_write.set)  # while it stops
    assert (await change).code == ResponseCode.SUCCESS
    async with bench.serving(tmp_path) as address:
        client = await connect(address)
        key = KvConfigKey(namespace="space", key="colour")
        reply = await client.call(RequestCode.GET_KV_CONFIG, key, timeout_s=30)
        assert reply.ext_fields["value"] == "red"
        client.close()
