"""LocalBroker: start and stop, kill, checks on demand, and faults, in a thread and in a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from escrowmq import Message, Producer, Verdict, blocking
from escrowmq.client.messages import SendResult
from escrowmq.config import load_config
from escrowmq.errors import BrokerStopped, ConfigError, TransportError
from escrowmq.remoting.codes import RequestCode
from escrowmq.testing import LocalBroker
from tests.interop.remoting import Client
from tests.support.brokers import next_response
from tests.support.messaging import send_v1_fields
from tests.support.stores import assert_clean
from tests.support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.slow

# A check comes only if the test asks for it.
NO_CHECKS = {"transactionTimeOut": 3_600_000}


def send(broker: LocalBroker, topic: str, body: bytes = b"1", **options: object) -> SendResult:
    with blocking.Producer(broker.servers, group=topic, **options) as producer:  # type: ignore[arg-type]
        return producer.send(Message(topic, body))


# --- start and stop ------------------------------------------------------------------------------


def test_a_message_is_delivered(any_broker: LocalBroker, topic: str) -> None:
    send(any_broker, topic)
    (message,) = any_broker.assert_delivered(topic, [b"1"])
    assert (message.topic, message.body) == (topic, b"1")


def test_what_was_acknowledged_is_there_after_a_kill(any_broker: LocalBroker, topic: str) -> None:
    address, servers = any_broker.address, any_broker.servers
    send(any_broker, topic)
    any_broker.kill()
    assert not any_broker.is_running
    assert (any_broker.data / "abort").exists()  # a clean stop removes it
    any_broker.start()
    assert (any_broker.address, any_broker.servers) == (address, servers)
    send(any_broker, topic, b"2")
    any_broker.assert_delivered(topic, [b"1", b"2"])


def test_what_was_acknowledged_is_there_after_a_restart(
    any_broker: LocalBroker, topic: str
) -> None:
    send(any_broker, topic)
    any_broker.restart()
    any_broker.assert_delivered(topic, [b"1"])


def test_a_producer_survives_a_kill_of_its_broker(any_broker: LocalBroker, topic: str) -> None:
    with blocking.Producer(any_broker.servers, group=topic, timeout_s=1, retries=0) as producer:
        producer.send(Message(topic, b"1"))
        any_broker.kill()
        with pytest.raises(TransportError):
            producer.send(Message(topic, b"lost"))
        any_broker.start()
        producer.send(Message(topic, b"2"))
    any_broker.assert_delivered(topic, [b"1", b"2"])


def test_nothing_answers_while_it_is_stopped(any_broker: LocalBroker, topic: str) -> None:
    any_broker.stop()
    assert not (any_broker.data / "abort").exists()
    host, _, port = any_broker.address.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    with pytest.raises(BrokerStopped, match=r"start\(\)"):
        any_broker.check_back_now()


def test_an_open_transaction_survives_a_kill_and_is_decided_by_a_check(
    any_broker: LocalBroker, topic: str
) -> None:
    # After its restart, the broker knows the producer as soon as a heartbeat has arrived.
    with blocking.Producer(any_broker.servers, group=topic, heartbeat_s=0.5) as producer:
        producer.checker("*")(lambda message: Verdict.COMMIT)
        with pytest.raises(KeyError), producer.transaction(Message(topic, b"open")):
            raise KeyError
        any_broker.kill()
        any_broker.start()
        any_broker.assert_delivered(topic, [b"open"], timeout_s=60)


def test_its_files_are_clean_after_a_kill_and_a_stop(tmp_path: Path) -> None:
    with LocalBroker(directory=tmp_path) as broker:
        send(broker, "clean")
        broker.kill()
        broker.start()
        send(broker, "clean")
    config = load_config(tmp_path / "broker.conf").config
    assert_clean(broker.data, config.store)


def test_a_temporary_directory_is_removed() -> None:
    with LocalBroker() as broker:
        assert broker.data.exists()
    assert not broker.directory.exists()


def test_settings_are_those_of_a_broker_conf(tmp_path: Path) -> None:
    with (
        LocalBroker({"brokerName": "tested"}) as broker,
        blocking.Producer(broker.servers, group="p") as producer,
    ):
        assert producer.send(Message("named", b"1")).queue.broker == "tested"
    with (
        pytest.raises(ConfigError, match="transactionTimeOut"),
        LocalBroker({"transactionTimeOut": "soon"}, directory=tmp_path),
    ):
        pass


def test_several_brokers_run_at_the_same_time() -> None:
    with LocalBroker() as first, LocalBroker() as second:
        send(first, "several", b"first")
        send(second, "several", b"second")
        first.assert_delivered("several", [b"first"])
        second.assert_delivered("several", [b"second"])


def test_a_port_that_is_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBroker() as first:
        taken = int(first.address.rpartition(":")[2])
        others = iter([taken, *range(taken + 1, taken + 100)])
        monkeypatch.setattr("escrowmq.testing.local_broker._free_port", lambda: next(others))
        with LocalBroker() as second:
            assert second.address != first.address
            send(second, "ports")


def test_the_process_of_the_test_keeps_its_settings() -> None:
    def process_state() -> tuple[object, ...]:
        return (
            gc.get_threshold(),
            gc.get_freeze_count(),
            sys.getswitchinterval(),
            signal.getsignal(signal.SIGTERM),
            signal.getsignal(signal.SIGINT),
            list(logging.getLogger().handlers),
            logging.getLogger().level,
        )

    before = process_state()
    with LocalBroker() as broker:
        send(broker, "unchanged")
        assert process_state() == before
    assert process_state() == before


def test_no_thread_is_left_after_the_end() -> None:
    before = set(threading.enumerate())
    with LocalBroker({"flushDiskType": "SYNC_FLUSH"}) as broker:
        send(broker, "threads")
        broker.kill()
        broker.start()
        send(broker, "threads")
    left = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
    assert left.isdisjoint({"escrowmq-broker", "escrowmq-flush", "escrowmq-kv-config", "asyncio"})


def test_the_process_of_the_broker_ends_with_the_one_that_started_it() -> None:
    script = (
        "import os, sys\n"
        "from escrowmq.testing import LocalBroker\n"
        "broker = LocalBroker(in_process=False)\n"
        "broker.start()\n"
        "print(broker.address, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    host, _, port = ended.stdout.decode().strip().rpartition(":")

    def is_gone() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) != 0

    wait_until(is_gone, "the broker has ended")


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_process", [True, False])
def test_a_check_comes_when_the_test_asks_for_it(in_process: bool) -> None:
    checked: list[str] = []

    def check(message: object) -> Verdict:
        checked.append(getattr(message, "topic", ""))
        return Verdict.COMMIT

    with (
        LocalBroker(NO_CHECKS, in_process=in_process) as broker,
        blocking.Producer(broker.servers, group="asked") as producer,
        blocking.Producer(broker.servers, group="other") as other,
    ):
        producer.checker("*")(check)
        other.checker("*")(check)
        for owner in (producer, other):
            with pytest.raises(KeyError), owner.transaction(Message(owner.group, b"open")):
                raise KeyError
        assert broker.check_back_now("asked") == 1
        broker.assert_delivered("asked", [b"open"])
        assert checked == ["asked"]
        assert len(broker.transactions("other")) == 1
        assert broker.messages("other") == []
        assert broker.check_back_now() == 1  # the other one, which is the only one left
        broker.assert_settled()
        assert checked == ["asked", "other"]


# --- faults --------------------------------------------------------------------------------------


def test_a_request_takes_effect_although_its_response_is_lost(
    any_broker: LocalBroker, topic: str
) -> None:
    # The connection breaks: the client does not wait for its timeout.
    with any_broker.lose_responses("send"), pytest.raises(TransportError) as caught:
        send(any_broker, topic, retries=0, timeout_s=3600)
    assert caught.value.may_have_happened
    any_broker.assert_delivered(topic, [b"1"])


def test_an_end_is_repeated_when_its_response_is_lost(any_broker: LocalBroker, topic: str) -> None:
    with (
        blocking.Producer(any_broker.servers, group=topic) as producer,
        any_broker.lose_responses("end", count=2),
        producer.transaction(Message(topic, b"1")) as tx,
    ):
        pass
    assert tx.outcome is not None
    assert tx.outcome.acknowledged
    any_broker.assert_delivered(topic, [b"1"])


def test_only_the_responses_that_are_named_are_lost(any_broker: LocalBroker, topic: str) -> None:
    with (
        pytest.raises(AssertionError, match="0 responses"),
        any_broker.lose_responses(RequestCode.CONSUMER_SEND_MSG_BACK),
    ):
        send(any_broker, topic, retries=0)
    with pytest.raises(ValueError, match=r"'sent'.*send"), any_broker.lose_responses("sent"):
        pass
    send(any_broker, topic, b"2", retries=0)
    any_broker.assert_delivered(topic, [b"1", b"2"])


def is_answered(client: Client) -> bool:
    """Return whether a response arrives soon."""
    readable, _, _ = select.select([client.socket], [], [], 0.2)
    return bool(readable)


def test_the_responses_of_a_slow_broker_are_late(any_broker: LocalBroker, topic: str) -> None:
    with Client(any_broker.address, timeout_s=TIMEOUT_S) as client:
        with any_broker.slow(3600):
            client.send_request(10, send_v1_fields(topic), b"1", flag=0)
            any_broker.assert_delivered(topic, [b"1"])
            assert not is_answered(client)
        assert next_response(client).code == 0


def test_a_slow_broker_answers(any_broker: LocalBroker, topic: str) -> None:
    with any_broker.slow(0.05):
        send(any_broker, topic, retries=0)
    any_broker.assert_delivered(topic, [b"1"])


def test_a_frozen_broker_answers_after_the_block(any_broker: LocalBroker, topic: str) -> None:
    with Client(any_broker.address, timeout_s=TIMEOUT_S) as client:
        with any_broker.frozen():
            client.send_request(10, send_v1_fields(topic), b"1", flag=0)
            assert not is_answered(client)
        assert next_response(client).code == 0
    any_broker.assert_delivered(topic, [b"1"])


def test_connections_are_refused_and_accepted_again(any_broker: LocalBroker, topic: str) -> None:
    with blocking.Producer(any_broker.servers, group=topic, timeout_s=1, retries=0) as producer:
        producer.send(Message(topic, b"1"))
        with any_broker.refuse_connections(), pytest.raises(TransportError):
            producer.send(Message(topic, b"lost"))
        producer.send(Message(topic, b"2"))
    send(any_broker, topic, b"3", retries=0)  # the broker is still registered
    any_broker.assert_delivered(topic, [b"1", b"2", b"3"])


def test_large_messages_pass_the_faults(any_broker: LocalBroker, topic: str) -> None:
    body = os.urandom(1 << 20)
    with any_broker.slow(0.01):
        send(any_broker, topic, body)
    any_broker.assert_delivered(topic, [body])


async def test_many_requests_are_in_flight_on_one_connection(
    any_broker: LocalBroker, topic: str
) -> None:
    bodies = [b"%d" % number for number in range(200)]
    async with Producer(any_broker.servers, group=topic) as producer:
        with any_broker.slow(0.005):
            await asyncio.gather(*(producer.send(Message(topic, body)) for body in bodies))
    await any_broker.assert_delivered_async(topic, bodies)
