"""Routes are also parsed by commands and by tasks of Spark, which run no event loop."""

from __future__ import annotations

import subprocess
import sys

import pytest

from escrowmq.client.topic_route import parse_route
from escrowmq.errors import BrokenResponse
from escrowmq.remoting.bodies import BrokerRoute, TopicRoute


@pytest.mark.parametrize(
    "brokers",
    [
        [("b", {0: "10.0.0.1:0"})],
        [("b", {0: "10.0.0.1:70000"})],
        [("b", {0: "nowhere"})],
        [("b", {0: "10.0.0.1:1", 1: ""})],
        [("b\nroot: ok", {0: "10.0.0.1:1"})],
        [("b", {0: "10.0.0.1:1"}), ("b", {0: "10.0.0.2:1"})],
    ],
    ids=["port 0", "large port", "no port", "replica", "line break", "two masters"],
)
def test_a_route_with_impossible_brokers_is_refused(
    brokers: list[tuple[str, dict[int, str]]],
) -> None:
    datas = [BrokerRoute(broker_name=name, broker_addrs=addresses) for name, addresses in brokers]
    with pytest.raises(BrokenResponse, match="the route of topic T has"):
        parse_route("T", TopicRoute(broker_datas=datas, queue_datas=[]))


def test_a_broker_that_is_listed_twice_counts_once() -> None:
    broker = BrokerRoute(broker_name="b", broker_addrs={0: "10.0.0.1:1"})
    route = parse_route("T", TopicRoute(broker_datas=[broker, broker], queue_datas=[]))
    assert route.broker_addresses == {"b": "10.0.0.1:1"}


def test_a_route_is_parsed_without_importing_asyncio() -> None:
    """asyncio would take 15 ms of the first task in every Python worker of Spark."""
    program = (
        "import sys\n"
        "from escrowmq.admin.cluster import Cluster\n"
        "from escrowmq.client.topic_route import parse_route\n"
        "print('asyncio' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert process.stdout == b"False\n"
