"""Brokers with short times between checks: EscrowMQ, and Apache RocketMQ in `make interop`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.interop import jars
from tests.interop.apache import ApacheRocketMQ
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.producers import QUEUES, TOPIC, Producer
from tests.interop.skipping import call_or_skip
from tests.support.clients import Broker
from tests.support.raw_transactions import CHECKS_MAX

ESCROWMQ, ROCKETMQ = "escrowmq", "4.9.7"
SETTINGS: dict[str, object] = {
    "mappedFileSizeCommitLog": 16 << 20,
    "transactionCheckMax": CHECKS_MAX,
    "messageDelayLevel": "1s 1s 1s 1s 1s 1s",
}
TIMES_MS = {ESCROWMQ: 300, ROCKETMQ: 1_000}

StartBroker = Callable[[Path], AbstractContextManager[Broker]]


@pytest.fixture(
    scope="session",
    params=[
        ESCROWMQ,
        pytest.param(ROCKETMQ, marks=[pytest.mark.apache, pytest.mark.nightly]),
    ],
)
def start_broker(request: pytest.FixtureRequest) -> StartBroker:
    """Return a function that starts a broker in a directory."""
    name: str = request.param
    times = dict.fromkeys(("transactionTimeOut", "transactionCheckInterval"), TIMES_MS[name])
    settings = {**SETTINGS, **times}
    if name == ESCROWMQ:
        return lambda directory: EscrowMQ(directory, settings)
    call_or_skip(f"RocketMQ {name}", lambda: jars.fetch(name))
    return lambda directory: ApacheRocketMQ(name, directory, settings)


@pytest.fixture(scope="session")
def broker(start_broker: StartBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Return a broker that all tests share, so a test names its messages uniquely."""
    with start_broker(tmp_path_factory.mktemp("articles")) as running:
        with Producer(running.address) as producer:
            producer.client.create_topic(TOPIC, queues=QUEUES)
        yield running


@pytest.fixture
def producer(broker: Broker) -> Iterator[Producer]:
    with Producer(broker.address) as producer:
        yield producer
