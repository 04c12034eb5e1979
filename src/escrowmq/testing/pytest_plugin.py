"""The pytest plugin that is installed with `escrowmq`.

    escrowmq_broker      a LocalBroker for the whole run
    escrowmq_topic       the name of a new topic for each test; use it as a group too
    escrowmq_settings    override it: settings of the broker, by their names in a broker.conf

pytest imports this module in every project that has `escrowmq` installed. So it imports the broker
only for a test that uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from escrowmq.testing import LocalBroker

_numbers: Final = itertools.count(1)


@pytest.fixture(scope="session")
def escrowmq_settings() -> Mapping[str, object]:
    """Return settings of the broker. Override this fixture to change them."""
    return {}


@pytest.fixture(scope="session")
def escrowmq_broker(escrowmq_settings: Mapping[str, object]) -> Iterator[LocalBroker]:
    """Yield a broker that runs in a thread of this process. `escrowmq_topic` starts it again."""
    from escrowmq.testing import LocalBroker

    with LocalBroker(escrowmq_settings) as broker:
        yield broker


@pytest.fixture
def escrowmq_topic(escrowmq_broker: LocalBroker) -> str:
    """Return the name of a new topic. Starts the broker again if a test has stopped it."""
    escrowmq_broker.start()
    topic = f"topic-{next(_numbers)}"
    escrowmq_broker.create_topic(topic)
    return topic
