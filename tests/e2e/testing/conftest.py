"""A broker in a thread and one in a process; tests that hold for both have `any_broker`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from escrowmq.testing import LocalBroker
from tests.support.waiting import TIMEOUT_S


@pytest.fixture(scope="package", params=["thread", "process"])
def any_broker(request: pytest.FixtureRequest) -> Iterator[LocalBroker]:
    is_thread = request.param == "thread"
    with LocalBroker(in_process=is_thread, timeout_s=TIMEOUT_S) as broker:
        yield broker


@pytest.fixture
def broker(escrowmq_broker: LocalBroker) -> LocalBroker:
    escrowmq_broker.start()
    escrowmq_broker.timeout_s = TIMEOUT_S
    return escrowmq_broker


@pytest.fixture
def topic(any_broker: LocalBroker, request: pytest.FixtureRequest) -> str:
    """Start the broker again if a test has stopped it, and return a name of this test alone."""
    any_broker.start()
    name: str = request.node.name
    return name.replace("[", "-").replace("]", "")
