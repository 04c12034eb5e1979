"""The pytest plugin, in projects of its users: they are run by pytest in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MANUAL = Path(__file__).parents[3] / "docs" / "testing.md"

SERVICE = """
from escrowmq import Message, Producer, blocking

def send(servers, topic, body):
    with blocking.Producer(servers, group=topic) as producer:
        producer.send(Message(topic, body))

async def send_async(servers, topic, body):
    async with Producer(servers, group=topic) as producer:
        await producer.send(Message(topic, body))
"""


def run_pytest(directory: Path, test: str, *options: str) -> str:
    """Run a test file as a user does, and return what pytest prints."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "service.py").write_text(SERVICE)
    (directory / "test_service.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
    finished = subprocess.run(
        [*command, str(directory)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return finished.stdout


def test_each_test_has_a_topic_and_all_share_a_broker(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
import pytest
from service import send

seen = set()

@pytest.mark.parametrize("number", range(3))
def test_it(escrowmq_broker, escrowmq_topic, number):
    send(escrowmq_broker.servers, escrowmq_topic, b"%d" % number)
    escrowmq_broker.assert_delivered(escrowmq_topic, [b"%d" % number])
    seen.add((escrowmq_broker.servers, escrowmq_topic))
    if number == 1:
        escrowmq_broker.kill()

def test_the_broker_is_the_same_and_the_topics_differ():
    assert len(seen) == 3
    assert len({servers for servers, _ in seen}) == 1
""",
    )
    assert "4 passed" in output, output


def test_the_smallest_test_of_the_manual_passes(tmp_path: Path) -> None:
    _, _, rest = MANUAL.read_text().partition("```python\n")
    output = run_pytest(tmp_path, rest.partition("```")[0])
    assert "1 passed" in output, output


def test_settings_are_changed_by_a_fixture(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
import pytest
from escrowmq import Message, blocking

@pytest.fixture(scope="session")
def escrowmq_settings():
    return {"brokerName": "configured"}

def test_it(escrowmq_broker, escrowmq_topic):
    with blocking.Producer(escrowmq_broker.servers, group="p") as producer:
        assert producer.send(Message(escrowmq_topic, b"1")).queue.broker == "configured"
""",
    )
    assert "1 passed" in output, output


def test_coroutines_run_under_pytest_asyncio(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
import pytest
from service import send_async

@pytest.mark.asyncio
async def test_it(escrowmq_broker, escrowmq_topic):
    await send_async(escrowmq_broker.servers, escrowmq_topic, b"1")
    await escrowmq_broker.assert_delivered_async(escrowmq_topic, [b"1"])
""",
    )
    assert "1 passed" in output, output


def test_coroutines_run_under_anyio(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
import pytest
from service import send_async

@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.anyio
async def test_it(escrowmq_broker, escrowmq_topic):
    await send_async(escrowmq_broker.servers, escrowmq_topic, b"1")
    await escrowmq_broker.assert_delivered_async(escrowmq_topic, [b"1"])
""",
        *("-p", "no:asyncio"),
    )
    assert "1 passed" in output, output


def test_the_plugin_imports_nothing_for_a_project_that_does_not_use_it(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
import sys

def test_it():
    assert "escrowmq.testing.pytest_plugin" in sys.modules
    loaded = {name for name in sys.modules if name.startswith("escrowmq")}
    assert loaded == {"escrowmq", "escrowmq.testing", "escrowmq.testing.pytest_plugin"}
    assert "uvloop" not in sys.modules
""",
    )
    assert "1 passed" in output, output


def test_a_failure_shows_what_was_delivered(tmp_path: Path) -> None:
    output = run_pytest(
        tmp_path,
        """
from service import send

def test_it(escrowmq_broker, escrowmq_topic):
    send(escrowmq_broker.servers, escrowmq_topic, b"other")
    escrowmq_broker.assert_delivered(escrowmq_topic, [b"this"])
""",
    )
    assert "1 failed" in output, output
    assert "delivered: 1" in output, output
    assert "b'other'" in output, output
