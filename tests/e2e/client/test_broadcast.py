"""Broadcast consumers: each gets all messages and stores its offsets in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from escrowmq import Consumer
from escrowmq.errors import ConfigError, LocalProtocolError
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, Broker, numbered_bodies, receive, send

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


def broadcast_consumer(server: Broker, topic: str, offsets: Path) -> Consumer:
    return Consumer(
        server.namesrv_address,
        group=f"g-{topic}",
        subscribe={topic: "*"},
        broadcast=True,
        offsets_file=offsets,
    )


async def test_every_broadcast_member_gets_all_messages_and_continues_from_its_file(
    server: Broker, tmp_path: Path
) -> None:
    await send(server, "cast", *numbered_bodies(8))
    first_file, second_file = tmp_path / "first" / "offsets.json", tmp_path / "second.json"
    async with (
        broadcast_consumer(server, "cast", first_file) as first,
        broadcast_consumer(server, "cast", second_file) as second,
    ):
        assert sorted(await receive(first, 8)) == numbered_bodies(8)
        assert sorted(await receive(second, 8)) == numbered_bodies(8)
    await send(server, "cast", b"more")
    async with broadcast_consumer(server, "cast", first_file) as first:
        assert await receive(first, 1) == [b"more"]
    rows = json.loads(first_file.read_text())["offsets"]
    assert sum(row["offset"] for row in rows) == 9


async def test_an_offsets_file_in_use_or_unreadable_is_refused(
    server: Broker, tmp_path: Path
) -> None:
    path = tmp_path / "offsets.json"
    await send(server, "alone", b"x")
    async with broadcast_consumer(server, "alone", path) as first:
        with pytest.raises(ConfigError, match="another consumer"):
            async with broadcast_consumer(server, "alone", path):
                pass
        message = await first.receive()
        with pytest.raises(LocalProtocolError, match="broadcast consumer"):
            await first.retry_later(message)
    path.write_text("{")
    with pytest.raises(ConfigError, match="remove it"):
        async with broadcast_consumer(server, "alone", path):
            pass
