"""Routes are also parsed by commands and by tasks of Spark, which run no event loop."""

from __future__ import annotations

import subprocess
import sys


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
