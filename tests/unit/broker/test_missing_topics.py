"""Topics that have queues but are not in topics.json, because an older file was put back."""

from __future__ import annotations

import json

import pytest

from escrowmq.message.topic_config import TopicConfig
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import TopicHeader
from escrowmq.store.check import check_store
from escrowmq.store.config_files import CHECKSUM_FIELD
from escrowmq.store.damage import DamageKind
from escrowmq.store.disk import read_file, write_file
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import new_request, pull_request, send_request
from tests.support.stores import NOW_MS

FILES = ("config/topics.json", "config/topics.json.bak")
NOTE = "topic T is not in the table but has"


def older_file(bench: BrokerBench) -> bytes:
    """Return topics.json as it is before the topic T is created by a send."""
    bench.turn(send_request("Other"))
    content = read_file(bench.disk, FILES[0])
    assert content is not None
    bench.turn(send_request("T", body=b"sent later"))
    return content


def put_back(disk: MemoryDisk, content: bytes) -> None:
    for path in FILES:
        write_file(disk, path, content)


def restarted(bench: BrokerBench) -> BrokerBench:
    bench.broker.save()
    bench.store.close()
    return BrokerBench(disk=bench.disk)


def without_checksum(content: bytes) -> bytes:
    fields = json.loads(content)
    del fields[CHECKSUM_FIELD]
    return json.dumps(fields).encode()


def pulled_code(bench: BrokerBench) -> int:
    (response,) = bench.turn(pull_request("T", queue_id=0))
    return response.code


def test_a_topic_that_an_older_file_does_not_have_is_restored_and_reported() -> None:
    bench = BrokerBench()
    older = older_file(bench)
    bench.broker.save()
    bench.store.close()
    put_back(bench.disk, older)
    assert any(NOTE in finding.what for finding in check_store(bench.disk).findings)
    restored = BrokerBench(disk=bench.disk)
    assert restored.store.damage.counts == {(DamageKind.CONFIG, True): 1}
    assert pulled_code(restored) == ResponseCode.SUCCESS
    again = restarted(restored)
    assert again.store.damage.total == 0
    assert pulled_code(again) == ResponseCode.SUCCESS


@pytest.mark.parametrize("is_older_file_used", [False, True])
def test_a_deleted_topic_stays_deleted(is_older_file_used: bool) -> None:
    bench = BrokerBench()
    older = older_file(bench)
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    bench.broker.save()
    bench.store.close()
    if is_older_file_used:
        put_back(bench.disk, older)
    again = BrokerBench(disk=bench.disk)
    assert again.broker.topics.find("T") is None
    assert again.store.damage.total == 0


def test_a_topic_whose_deletion_was_interrupted_stays_deleted() -> None:
    bench = BrokerBench()
    older_file(bench)
    bench.broker.topics.remove("T", now_ms=NOW_MS)
    bench.broker.topics.save()  # the next step would remove the queues
    again = restarted(restarted(bench))
    assert again.broker.topics.find("T") is None
    assert again.store.has_queue("T", 0)
    assert again.store.damage.total == 0


def test_a_topic_that_is_created_again_after_its_deletion_is_restored() -> None:
    bench = BrokerBench()
    older = older_file(bench)
    bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")))
    bench.turn(send_request("T", body=b"sent again"))
    bench.broker.save()
    bench.store.close()
    put_back(bench.disk, older)
    assert pulled_code(BrokerBench(disk=bench.disk)) == ResponseCode.SUCCESS


def test_a_topic_is_not_restored_if_another_program_has_written_the_file() -> None:
    bench = BrokerBench()
    older = older_file(bench)
    bench.broker.save()
    bench.store.close()
    put_back(bench.disk, without_checksum(older))
    again = BrokerBench(disk=bench.disk)
    assert again.broker.topics.find("T") is None
    assert again.store.damage.counts == {(DamageKind.CONFIG, False): 1}
    once_more = restarted(again)
    assert once_more.broker.topics.find("T") is None
    assert once_more.store.damage.total == 0


def test_the_names_of_deleted_topics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.broker.metadata.REMOVED_TOPICS_MAX", 2)
    bench = BrokerBench()
    for number in range(5):
        config = TopicConfig(topic_name=f"T{number}", read_queue_nums=1, write_queue_nums=1)
        bench.broker.topics.put(config, now_ms=NOW_MS)
        bench.broker.topics.remove(f"T{number}", now_ms=NOW_MS)
    bench.broker.topics.save()
    content = json.loads(read_file(bench.disk, FILES[0]) or b"")
    assert content["escrowRemovedTopics"] == ["T3", "T4"]
