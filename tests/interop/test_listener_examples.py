"""The listener examples print the same table against our broker and against Apache RocketMQ.

The Java program is run by Maven, as its page says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.interop import jars
from tests.interop.apache import ApacheRocketMQ
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.skipping import call_or_skip
from tests.support.listener_example import EXAMPLES, RESULTS, SHORT_CHECKS

pytestmark = [pytest.mark.apache, pytest.mark.slow]

RUN_S = 600  # the first run downloads the client and Maven's plugins
OURS, APACHE = "escrowmq", "5.5.0"
# RocketMQ 5 stores its op records up to 3 s late. With shorter intervals it checks and discards
# messages that are already rolled back.
APACHE_CHECKS = {**SHORT_CHECKS, "transactionCheckInterval": 5_000}


@contextmanager
def name_server(broker: str, directory: Path) -> Iterator[str]:
    """Start a broker with short checks and yield the address of its name server."""
    if broker == OURS:
        with EscrowMQ(directory, SHORT_CHECKS) as escrowmq:
            yield escrowmq.namesrv_address
    else:
        call_or_skip(f"RocketMQ {broker}", lambda: jars.fetch(broker))
        with ApacheRocketMQ(broker, directory, APACHE_CHECKS) as rocketmq:
            yield rocketmq.namesrv_address


def run_example(command: list[str], servers: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "SERVERS": servers, "WAIT_S": "180"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


@pytest.mark.nightly
@pytest.mark.timeout(RUN_S + 120)
@pytest.mark.parametrize("broker", [OURS, APACHE])
def test_the_java_example_prints_the_table(broker: str, tmp_path: Path) -> None:
    if shutil.which("javac") is None or shutil.which("mvn") is None:
        pytest.skip("Java or Maven is missing (no `javac` or no `mvn` on the path)")
    project = shutil.copytree(
        EXAMPLES / "java", tmp_path / "java", ignore=shutil.ignore_patterns("target")
    )
    command = ["mvn", "-q", "-B", "-f", str(project)]
    with name_server(broker, tmp_path / "broker") as servers:
        prepared = run_example([*command, "compile"], servers)
        if "could not be resolved" in prepared.stdout or "Could not transfer" in prepared.stdout:
            pytest.skip(f"Maven cannot download: {prepared.stdout[-300:]}")
        assert prepared.returncode == 0, prepared.stdout
        run = run_example([*command, "exec:java"], servers)
    assert run.returncode == 0, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if line in RESULTS] == RESULTS, run.stdout


@pytest.mark.nightly
def test_the_python_example_prints_the_same_table_against_apache(tmp_path: Path) -> None:
    with name_server(APACHE, tmp_path / "broker") as servers:
        command = [sys.executable, str(EXAMPLES / "transaction_listener.py")]
        run = run_example(command, servers)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-len(RESULTS) :] == RESULTS, run.stdout
