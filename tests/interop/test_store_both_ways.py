"""Apache RocketMQ serves a directory that EscrowMQ wrote, and EscrowMQ one that Apache wrote.

Messages are compared as bytes: what a client pulls is what the log contains.

CI has every kind of directory once. It takes 4.9.7, which starts faster, except for record CRCs,
which only 5.5.0 verifies; `make interop` runs every kind with both releases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from escrowmq.config import StoreConfig
from tests.interop import samples
from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import decode_record
from tests.interop.releases import with_cases_and_releases
from tests.interop.remoting import Client, SendResult
from tests.interop.samples import StoreContents
from tests.interop.script import unique_key
from tests.interop.serving import (
    SYSTEM_TOPICS,
    assert_finds_by_time,
    assert_serves,
    log_sizes,
    logged_errors,
    pull_bytes,
    send_everything,
    served_contents,
)
from tests.interop.stores import log_bytes, open_store, read_all, settings_of
from tests.support.stores import assert_clean

pytestmark = [pytest.mark.apache, pytest.mark.slow]

NO_CHECKS: dict[str, object] = {  # and ops almost without delay
    "transactionCheckInterval": 600_000,
    "transactionTimeOut": 3_600_000,
    "transactionOpBatchInterval": 100,
}
SMALL_FILES: dict[str, object] = {
    **NO_CHECKS,
    "mappedFileSizeCommitLog": 128 * 1024,
    "mappedFileSizeConsumeQueue": 30 * 20,
    "maxHashSlotNum": 100,
    "maxIndexNum": 120,
}
RECORD_CRC: dict[str, object] = {
    **SMALL_FILES,
    "enabledAppendPropCRC": True,
    "forceVerifyPropCRC": True,
}

WriteStore = Callable[..., StoreContents]


# --- written by us, served by Apache ----------------------------------------------------------


@with_cases_and_releases(
    ("write_store", "conf", "count"),
    {
        "closed": (samples.write_store, SMALL_FILES, 150),
        "killed": (samples.write_killed_store, SMALL_FILES, 150),
        "record CRC": (samples.write_killed_store, RECORD_CRC, 150),
        "default file sizes": (samples.write_store, NO_CHECKS, 30),
    },
    in_ci={
        ("4.9.7", "closed"),
        ("4.9.7", "killed"),
        ("5.5.0", "record CRC"),
        ("4.9.7", "default file sizes"),
    },
)
def test_apache_serves_our_store_and_we_serve_what_apache_added(
    write_store: WriteStore, conf: Mapping[str, object], count: int, version: str, tmp_path: Path
) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, conf)
    settings = settings_of(conf)
    written = write_store(rocketmq.store, settings, version=version, count=count)
    assert written.count > count
    assert_log_contains(rocketmq.store, written)
    if "mappedFileSizeCommitLog" in conf:
        assert_has_several_files(rocketmq.store)

    with rocketmq, Client(rocketmq.address) as client:
        assert_serves(client, written)
        assert_finds_by_time(client, written, queue=("orders", 1), version=version)
        for topic_and_group, queues in samples.COMMITTED.items():
            topic, group = topic_and_group.split("@")
            for queue_id, queue_offset in queues.items():
                assert client.committed_offset(group, topic, queue_id) == queue_offset
        assert logged_errors(rocketmq) == []
        extended = send_to_every_queue(client, written)
        assert extended.queues.keys() > written.queues.keys()
        assert_serves(client, extended)
        rocketmq.kill()  # quicker than a stop, and our recovery has to cope with it

    if settings.sealed:
        apache_writes_crc = version != "4.9.7" and conf is RECORD_CRC
        with_crc = extended if apache_writes_crc else written
        assert all(map(has_record_crc, with_crc.messages()))
    assert_we_serve(rocketmq.store, settings, extended)


def send_to_every_queue(client: Client, written: StoreContents) -> StoreContents:
    """Send a message to every user queue. Checks that it follows the messages already there."""
    extended = StoreContents(queues={**written.queues, ("later", 0): []}, keys=dict(written.keys))
    log_offset = written.end
    for (topic, queue_id), messages in list(extended.queues.items()):
        if topic in SYSTEM_TOPICS:
            continue
        sent = client.send(topic, b"from Apache", {"KEYS": "added"}, queue_id=queue_id)
        assert sent.queue_offset == len(messages), f"{topic} {queue_id}"
        assert sent.log_offset >= log_offset
        log_offset = sent.log_offset
        extended.queues[topic, queue_id] = [*messages, stored_message(client, sent)]
        extended.keys.setdefault((topic, "added"), set()).add(sent.log_offset)
    return extended


def has_record_crc(message: bytes) -> bool:
    return message[-20:].startswith(b"__CRC32#\x01")


def stored_message(client: Client, sent: SendResult) -> bytes:
    return client.expect(33, {"offset": sent.log_offset}).body


def assert_we_serve(directory: Path, settings: StoreConfig, contents: StoreContents) -> None:
    """Open the store, and check its queues and keys. Leaves it closed and clean."""
    assert_clean(directory, settings)
    store = open_store(directory, settings)
    try:
        assert store.recovery.damage == []
        for (topic, queue_id), messages in contents.queues.items():
            read = read_all(store, topic, queue_id)
            assert read[: len(messages)] == messages, f"{topic} {queue_id}"
        for (topic, queue_id), count in contents.hidden.items():
            assert store.max_offset(topic, queue_id) == count
        for (topic, key), log_offsets in contents.keys.items():
            records = store.find_by_key(topic, key)
            assert {record.log_offset for record in records} == log_offsets, f"{topic} {key}"
    finally:
        store.close()
    assert assert_clean(directory, settings).findings == []


def assert_log_contains(directory: Path, contents: StoreContents) -> None:
    log = log_bytes(directory / "commitlog")
    for message in contents.messages():
        assert log[decode_record(message).log_offset] == message


def assert_has_several_files(directory: Path) -> None:
    assert len(list((directory / "commitlog").iterdir())) >= 3
    assert len(list((directory / "index").iterdir())) >= 2
    assert max(len(list(queue.iterdir())) for queue in directory.glob("consumequeue/*/*")) >= 2


# --- written by Apache, extended by us, served by Apache ---------------------------------------


@with_cases_and_releases(
    ("shutdown",),
    {"stopped": ("stopped",), "killed": ("killed",)},
    in_ci={("4.9.7", "stopped")},
)
def test_apache_serves_its_own_store_after_we_appended_to_it(
    shutdown: str, version: str, tmp_path: Path
) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, SMALL_FILES)
    settings = settings_of(SMALL_FILES)
    keys = [("orders", "decade-3"), ("payments", "batch"), ("orders", "no-such-key")]
    keys += [("orders", f"k-{number}") for number in range(0, 200, 7)]
    keys += [("orders", unique_key(10_000)), ("payments", unique_key(203))]
    with rocketmq:
        with Client(rocketmq.address) as client:
            # After a kill, Apache may deliver the message of level 1 again: do not send it.
            delay_levels = [1, 18] if shutdown == "stopped" else [18]
            send_everything(client, 200, delay_levels=delay_levels)
            served = served_contents(client, keys)
        # Plain messages, those in batches, the committed half, and the delayed ones.
        assert served.count >= 200 + 20 + 1 + len(delay_levels)
        if shutdown == "stopped":
            rocketmq.stop_broker()
        else:
            rocketmq.kill()

        assert_we_serve(rocketmq.store, settings, served)
        contents = append_ours(rocketmq.store, settings)

        sizes = log_sizes(rocketmq)
        rocketmq.start()
        with Client(rocketmq.address) as client:
            for queue in served.hidden:
                assert client.max_offset(*queue) >= len(contents.queues.pop(queue))
            assert_serves(client, contents)
            assert pull_bytes(client, "ours", 0) == contents.queues["ours", 0] != []
            assert logged_errors(rocketmq, since=sizes) == []
            extended = send_to_every_queue(client, contents)
        rocketmq.kill()

    assert_we_serve(rocketmq.store, settings, extended)


def append_ours(directory: Path, settings: StoreConfig) -> StoreContents:
    """Append messages with our store. Returns everything in it."""
    samples.add_topic(directory, "ours")
    samples.add_topic(directory, samples.RETRY_TOPIC)
    samples.add_topic(directory, "later")
    store = open_store(directory, settings)
    records = [samples.sample(number + 1_000) for number in range(40)]
    records += [samples.special(f"ours {number}", topic="ours") for number in range(40)]
    contents = samples.append_samples(store, iter(records), start_ms=samples.now_ms())
    store.close()
    assert_clean(directory, settings)
    return contents
