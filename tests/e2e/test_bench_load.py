"""The load generator counts what the broker really took, and does not count what it refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import generator
from bench.generator import Load, LoadFailed, NoCompiler, Outcome, run
from bench.servers import EscrowMQ, client, clients, family

pytestmark = pytest.mark.slow

QUEUES = 2
SHORT = Load("send", seconds=0.3, warm_up_s=0.1, queues=QUEUES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EscrowMQ]:
    try:
        generator.built("load")
    except NoCompiler as error:
        pytest.skip(str(error))
    server = EscrowMQ(tmp_path_factory.mktemp("bench"), {})
    server.start()
    yield server
    server.stop()


def put(server: EscrowMQ, mode: str, topic: str, **more: int) -> Outcome:
    arguments = {**SHORT.__dict__, "mode": mode, "topic": topic, **more}
    return run(Load(**arguments), server.ports, family(server.pids))


def stored(server: EscrowMQ, *topics: str) -> int:
    with client(server) as asker:
        return sum(asker.max_offset(topic, queue) for topic in topics for queue in range(QUEUES))


def create(server: EscrowMQ, *topics: str) -> None:
    with client(server) as admin:
        for topic in topics:
            admin.create_topic(topic, queues=QUEUES)


@pytest.mark.parametrize(("connections", "depth"), [(1, 1), (3, 8)])
def test_what_was_counted_as_sent_is_stored(server: EscrowMQ, connections: int, depth: int) -> None:
    topic = f"sent-{connections}-{depth}"
    create(server, topic)
    told = put(server, "send", topic, connections=connections, depth=depth)
    assert told.messages_in_all == stored(server, topic) >= told.messages > 0
    assert (told.errors, told.unasked, told.unanswered) == ({}, {}, 0)
    assert 0 < told.p50_us <= told.p99_us <= told.p999_us <= told.max_us
    assert told.server_cpu_s > 0


def test_messages_are_distinct_and_go_to_every_topic_and_queue(server: EscrowMQ) -> None:
    names = ["spread0", "spread1", "spread2"]
    create(server, *names)
    told = put(server, "send", "spread", topics=3)
    assert told.messages_in_all == stored(server, *names)
    with client(server) as reader:
        queues = [reader.pull_all(name, queue) for name in names for queue in range(QUEUES)]
    sizes = [len(records) for records in queues]
    assert max(sizes) - min(sizes) <= 1
    unique = {record.properties["UNIQ_KEY"] for records in queues for record in records}
    assert len(unique) == sum(sizes)


@pytest.mark.parametrize("depth", [1, 4])
def test_pulls_count_the_messages_they_brought(server: EscrowMQ, depth: int) -> None:
    create(server, "pulled")
    put(server, "send", "pulled", depth=8)
    before = stored(server, "pulled")
    told = put(server, "pull", "pulled", connections=QUEUES, depth=depth)
    assert told.answers <= told.messages <= 32 * told.answers
    assert told.messages > 0
    assert (told.errors, told.unanswered) == ({}, 0)
    assert stored(server, "pulled") == before


def test_the_connections_are_spread_over_all_brokers(tmp_path: Path, server: EscrowMQ) -> None:
    several = EscrowMQ(tmp_path, {}, brokers=2)
    several.start()
    try:
        with clients(several) as admins:
            for admin in admins:
                admin.create_topic("spread", queues=QUEUES)
            told = put(several, "tx", "spread", connections=2, depth=4, acknowledged=True)
            each = [
                sum(admin.max_offset("spread", queue) for queue in range(QUEUES))
                for admin in admins
            ]
    finally:
        several.stop()
    assert min(each) > 0
    assert sum(each) == told.messages_in_all
    assert (told.errors, told.unanswered) == ({}, 0)


def test_a_refused_request_is_an_error_and_no_message(server: EscrowMQ) -> None:
    told = put(server, "pull", "nobody-made-this-topic")
    assert told.messages == told.messages_in_all == 0
    assert sum(told.errors.values()) > 0


def test_nobody_there_is_said_and_not_measured(tmp_path: Path, server: EscrowMQ) -> None:
    with pytest.raises(LoadFailed, match="cannot connect"):
        run(SHORT, EscrowMQ(tmp_path, {}).ports, [])


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="needs a C compiler"):
        generator.built.__wrapped__("load")
