"""One directory, two brokers: what we wrote Apache RocketMQ serves, and the other way round.

Every message is compared as bytes: what a client pulls from Apache is what lies in our log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from escrowmq.config import StoreConfig
from tests.interop import samples
from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import decode_record
from tests.interop.remoting import Client, SendResult
from tests.interop.samples import Laid
from tests.interop.serving import (
    SYSTEM_TOPICS,
    assert_finds_by_time,
    assert_serves,
    complaints,
    log_sizes,
    pull_bytes,
    send_everything,
    what_is_served,
)
from tests.interop.stores import log_bytes, open_store, read_all, settings_of
from tests.support.stores import assert_clean

pytestmark = [pytest.mark.apache, pytest.mark.slow]

QUIET: dict[str, object] = {  # no check-back, and ops without delay
    "transactionCheckInterval": 600_000,
    "transactionTimeOut": 3_600_000,
    "transactionOpBatchInterval": 100,
}
SMALL: dict[str, object] = {
    **QUIET,
    "mappedFileSizeCommitLog": 128 * 1024,
    "mappedFileSizeConsumeQueue": 30 * 20,
    "maxHashSlotNum": 100,
    "maxIndexNum": 120,
}
SEALED: dict[str, object] = {**SMALL, "enabledAppendPropCRC": True, "forceVerifyPropCRC": True}

LayStore = Callable[..., Laid]


# --- ours, then Apache's -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lay_store", "conf", "count"),
    [
        (samples.lay_store, SMALL, 150),
        (samples.lay_killed_store, SMALL, 150),
        (samples.lay_killed_store, SEALED, 150),
        (samples.lay_store, QUIET, 30),
    ],
    ids=["closed", "killed", "sealed", "of the usual sizes"],
)
def test_apache_serves_what_we_wrote_and_we_what_it_added(
    lay_store: LayStore, conf: Mapping[str, object], count: int, version: str, tmp_path: Path
) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, conf)
    settings = settings_of(conf)
    laid = lay_store(rocketmq.store, settings, version=version, count=count)
    assert laid.count > count
    assert_is_in_the_log(laid, rocketmq.store)
    if "mappedFileSizeCommitLog" in conf:
        assert_has_several_files(rocketmq.store)

    with rocketmq, Client(rocketmq.address) as client:
        assert_serves(client, laid)
        assert_finds_by_time(client, laid, queue=("orders", 1), version=version)
        for group, queues in samples.COMMITTED.items():
            topic, name = group.split("@")
            for queue_id, offset in queues.items():
                assert client.committed_offset(name, topic, queue_id) == offset
        assert complaints(rocketmq) == []
        added = send_more(client, laid)
        assert added.queues.keys() > laid.queues.keys()
        assert_serves(client, added)
        rocketmq.kill()  # quicker than a stop, and harder on us

    if settings.sealed:
        theirs_too = version != "4.9.7"  # which knows no seals
        assert all(map(is_sealed, (added if theirs_too else laid).messages()))
    assert_we_serve(rocketmq.store, settings, added)


def send_more(client: Client, laid: Laid) -> Laid:
    """New messages in every queue of users take the offsets behind those that are there."""
    added = Laid(queues={**laid.queues, ("later", 0): []}, keys=dict(laid.keys))
    log_offset = laid.end
    for (topic, queue_id), before in list(added.queues.items()):
        if topic in SYSTEM_TOPICS:
            continue
        sent = client.send(topic, b"of Apache", {"KEYS": "added"}, queue_id=queue_id)
        assert sent.queue_offset == len(before), f"{topic} {queue_id}"
        assert sent.log_offset >= log_offset
        log_offset = sent.log_offset
        added.queues[topic, queue_id] = [*before, one_message(client, sent)]
        added.keys.setdefault((topic, "added"), set()).add(sent.log_offset)
    return added


def is_sealed(message: bytes) -> bool:
    return message[-20:].startswith(b"__CRC32#\x01")


def one_message(client: Client, sent: SendResult) -> bytes:
    return client.expect(33, {"offset": sent.log_offset}).body


def assert_we_serve(directory: Path, settings: StoreConfig, laid: Laid) -> None:
    assert_clean(directory, settings)
    store = open_store(directory, settings)
    try:
        assert store.recovery.damage == []
        for (topic, queue_id), messages in laid.queues.items():
            ours = read_all(store, topic, queue_id)
            assert ours[: len(messages)] == messages, f"{topic} {queue_id}"
        for (topic, queue_id), count in laid.hidden.items():
            assert store.max_offset(topic, queue_id) == count
        for (topic, key), log_offsets in laid.keys.items():
            found = {record.log_offset for record in store.find_by_key(topic, key)}
            assert found == log_offsets, f"{topic} {key}"
    finally:
        store.close()
    assert assert_clean(directory, settings).findings == []


def assert_is_in_the_log(laid: Laid, directory: Path) -> None:
    log = log_bytes(directory / "commitlog")
    for messages in laid.queues.values():
        for message in messages:
            assert log[decode_record(message).log_offset] == message


def assert_has_several_files(directory: Path) -> None:
    assert len(list((directory / "commitlog").iterdir())) >= 3
    assert len(list((directory / "index").iterdir())) >= 2
    assert max(len(list(queue.iterdir())) for queue in directory.glob("consumequeue/*/*")) >= 2


# --- Apache's, then ours, then Apache's --------------------------------------------------------


@pytest.mark.parametrize("ending", ["stopped", pytest.param("killed", marks=pytest.mark.nightly)])
def test_there_and_back_and_there_again(ending: str, version: str, tmp_path: Path) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, SMALL)
    settings = settings_of(SMALL)
    keys = [("orders", "decade-3"), ("payments", "batch"), ("orders", "no-such-key")]
    keys += [("orders", f"k-{number}") for number in range(0, 200, 7)]
    keys += [("orders", samples.unique_key(10_000)), ("payments", samples.unique_key(203))]
    with rocketmq:
        with Client(rocketmq.address) as client:
            # A broker that is killed may deliver what was due once more.
            delay_levels = [1, 18] if ending == "stopped" else [18]
            send_everything(client, 200, delay_levels=delay_levels)
            seen = what_is_served(client, keys)
        assert seen.count >= 200 + 20 + 1 + len(delay_levels)  # batches, a commit, delays
        if ending == "stopped":
            rocketmq.stop_broker()
        else:
            rocketmq.kill()

        assert_we_serve(rocketmq.store, settings, seen)
        both = append_ours(rocketmq.store, settings)

        before = log_sizes(rocketmq)
        rocketmq.start()
        with Client(rocketmq.address) as client:
            for queue in seen.hidden:
                assert client.max_offset(*queue) >= len(both.queues.pop(queue))
            assert_serves(client, both)
            assert pull_bytes(client, "ours", 0) == both.queues["ours", 0] != []
            assert complaints(rocketmq, since=before) == []
            added = send_more(client, both)
        rocketmq.kill()

    assert_we_serve(rocketmq.store, settings, added)


def append_ours(directory: Path, settings: StoreConfig) -> Laid:
    samples.add_topic(directory, "ours")
    samples.add_topic(directory, samples.RETRY_TOPIC)
    samples.add_topic(directory, "later")
    store = open_store(directory, settings)
    ours = [samples.sample(number + 1_000) for number in range(40)]
    ours += [samples.special(f"ours {number}", topic="ours") for number in range(40)]
    laid = samples.append_samples(store, iter(ours), began_ms=samples.now_ms())
    store.close()
    assert_clean(directory, settings)
    return laid
