"""The load generator counts the messages that the broker stored_count, and not those it refused."""

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


def run_load(server: EscrowMQ, mode: str, topic: str, **changes: int) -> Outcome:
    arguments = {**SHORT.__dict__, "mode": mode, "topic": topic, **changes}
    return run(Load(**arguments), server.ports, family(server.pids))


def stored_count(server: EscrowMQ, *topics: str) -> int:
    with client(server) as reader:
        return sum(reader.max_offset(topic, queue) for topic in topics for queue in range(QUEUES))


def create_topics(server: EscrowMQ, *topics: str) -> None:
    with client(server) as admin:
        for topic in topics:
            admin.create_topic(topic, queues=QUEUES)


@pytest.mark.parametrize(("connections", "depth"), [(1, 1), (3, 8)])
def test_messages_counted_as_sent_are_stored(
    server: EscrowMQ, connections: int, depth: int
) -> None:
    topic = f"sent-{connections}-{depth}"
    create_topics(server, topic)
    outcome = run_load(server, "send", topic, connections=connections, depth=depth)
    assert outcome.messages_in_all == stored_count(server, topic) >= outcome.messages > 0
    assert (outcome.errors, outcome.unasked, outcome.unanswered) == ({}, {}, 0)
    assert 0 < outcome.p50_us <= outcome.p99_us <= outcome.p999_us <= outcome.max_us
    assert outcome.server_cpu_s > 0


def test_messages_are_distinct_and_go_to_every_topic_and_queue(server: EscrowMQ) -> None:
    names = ["spread0", "spread1", "spread2"]
    create_topics(server, *names)
    outcome = run_load(server, "send", "spread", topics=3)
    assert outcome.messages_in_all == stored_count(server, *names)
    with client(server) as reader:
        queues = [reader.pull_all(name, queue) for name in names for queue in range(QUEUES)]
    sizes = [len(records) for records in queues]
    assert max(sizes) - min(sizes) <= 1
    unique_keys = {record.properties["UNIQ_KEY"] for records in queues for record in records}
    assert len(unique_keys) == sum(sizes)


@pytest.mark.parametrize("depth", [1, 4])
def test_pulls_count_the_messages_of_their_responses(server: EscrowMQ, depth: int) -> None:
    create_topics(server, "pulled")
    run_load(server, "send", "pulled", depth=8)
    count = stored_count(server, "pulled")
    outcome = run_load(server, "pull", "pulled", connections=QUEUES, depth=depth)
    assert outcome.answers <= outcome.messages <= 32 * outcome.answers
    assert outcome.messages > 0
    assert (outcome.errors, outcome.unanswered) == ({}, 0)
    assert stored_count(server, "pulled") == count


def test_connections_are_divided_among_all_brokers(tmp_path: Path, server: EscrowMQ) -> None:
    several = EscrowMQ(tmp_path, {}, brokers=2)
    several.start()
    try:
        with clients(several) as admins:
            for admin in admins:
                admin.create_topic("spread", queues=QUEUES)
            outcome = run_load(several, "tx", "spread", connections=2, depth=4, acknowledged=True)
            counts = [
                sum(admin.max_offset("spread", queue) for queue in range(QUEUES))
                for admin in admins
            ]
    finally:
        several.stop()
    assert min(counts) > 0
    assert sum(counts) == outcome.messages_in_all
    assert (outcome.errors, outcome.unanswered) == ({}, 0)


def test_a_refused_request_counts_as_an_error(server: EscrowMQ) -> None:
    outcome = run_load(server, "pull", "no-such-topic")
    assert outcome.messages == outcome.messages_in_all == 0
    assert sum(outcome.errors.values()) > 0


def test_a_load_without_a_server_fails(tmp_path: Path, server: EscrowMQ) -> None:
    with pytest.raises(LoadFailed, match="cannot connect"):
        run(SHORT, EscrowMQ(tmp_path, {}).ports, [])


def test_a_missing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoCompiler, match="needs a C compiler"):
        generator.built.__wrapped__("load")
