"""SIGHUP: what changes at once, what waits for a restart, what changes nothing; and log lines."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.brokers import WAIT_S, NotStarted, Served

pytestmark = pytest.mark.slow


def wait_for(served: Served, text: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while text not in served.errors:
        assert time.monotonic() < deadline_s, served.errors
        with served.client() as client:  # it has taken a turn since
            client.request(9_999)


def change(served: Served, before: str, after: str) -> None:
    served.conf.write_text(served.conf.read_text().replace(before, after))
    served.hang_up()


def test_limits_and_the_log_level_change_without_a_restart(tmp_path: Path) -> None:
    conf = {"enablePropertyFilter": "false", "fileReservedTime": "48", "brokerName": "first"}
    with Served(tmp_path, conf=conf) as served, served.client() as client:
        client.create_topic("orders")
        client.send("orders", b"1", {"price": "7"})
        assert (
            client.pull("orders", 0, 0, subscription="price > 5", expression_type="SQL92").code == 1
        )
        change(served, "enablePropertyFilter=false", "enablePropertyFilter=true")
        wait_for(served, "enablePropertyFilter changed from false to true")
        assert (
            client.pull("orders", 0, 0, subscription="price > 5", expression_type="SQL92").code == 0
        )

        change(served, "brokerName=first", "brokerName=second\nmaxTransferCountOnMessageInMemory=1")
        wait_for(served, "brokerName is still first: the new value second needs a restart")
        wait_for(served, "maxTransferCountOnMessageInMemory changed from 32 to 1")

        change(served, "fileReservedTime=48", "fileReservedTime=never")
        wait_for(served, "configuration not reloaded, nothing has changed")
        change(served, "fileReservedTime=never", "fileReservedTime=48\nescrowLogLevel=ERROR")
        wait_for(served, "escrowLogLevel changed from INFO to ERROR")
        before = served.errors
    assert served.errors == before  # "stopping" is no error


def test_log_lines_can_be_json(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.arguments += ["--log-format", "json", "--log-level", "info"]
    with served:
        pass
    lines = [json.loads(line) for line in served.errors.splitlines()]
    assert {line["level"] for line in lines} == {"INFO"}
    [opened] = [line for line in lines if line["message"].startswith("store open")]
    assert opened["directory"] == str(served.data)
    assert opened["begin"] == 0


def test_a_level_that_there_is_not_is_refused(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.arguments += ["--log-level", "loud"]
    with pytest.raises(NotStarted, match="must be DEBUG or INFO or WARNING or ERROR"):
        served.start()
