"""SIGHUP: settings that change at once, need a restart or are refused; and formats of the log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.brokers import Server, StartFailed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


def wait_for_log(served: Server, text: str) -> None:
    wait_until(lambda: text in served.errors, lambda: f"{text!r} is in the log:\n{served.errors}")


def change(served: Server, before: str, after: str) -> None:
    """Replace a text in the configuration file, and let the broker read the file again."""
    served.conf.write_text(served.conf.read_text().replace(before, after))
    served.reload()


def test_limits_and_the_log_level_change_without_a_restart(tmp_path: Path) -> None:
    conf = {"enablePropertyFilter": "false", "fileReservedTime": "48", "brokerName": "first"}
    with Server(tmp_path, conf=conf) as served, served.client() as client:
        client.create_topic("orders")
        client.send("orders", b"1", {"price": "7"})
        assert (
            client.pull("orders", 0, 0, subscription="price > 5", expression_type="SQL92").code == 1
        )
        change(served, "enablePropertyFilter=false", "enablePropertyFilter=true")
        wait_for_log(served, "enablePropertyFilter changed from false to true")
        assert (
            client.pull("orders", 0, 0, subscription="price > 5", expression_type="SQL92").code == 0
        )

        change(served, "brokerName=first", "brokerName=second\nmaxTransferCountOnMessageInMemory=1")
        wait_for_log(served, "brokerName is still first: the new value second needs a restart")
        wait_for_log(served, "maxTransferCountOnMessageInMemory changed from 32 to 1")

        change(served, "fileReservedTime=48", "fileReservedTime=never")
        wait_for_log(served, "configuration not reloaded, nothing has changed")
        change(served, "fileReservedTime=never", "fileReservedTime=48\nescrowLogLevel=ERROR")
        wait_for_log(served, "escrowLogLevel changed from INFO to ERROR")
        log = served.errors
    assert served.errors == log  # the message "stopping" is below the level ERROR


def test_log_lines_can_be_json(tmp_path: Path) -> None:
    served = Server(tmp_path)
    served.arguments += ["--log-format", "json", "--log-level", "info"]
    with served:
        pass
    lines = [json.loads(line) for line in served.errors.splitlines()]
    assert {line["level"] for line in lines} == {"INFO"}
    [opened] = [line for line in lines if line["message"].startswith("store open")]
    assert opened["directory"] == str(served.data)
    assert opened["begin"] == 0


def test_an_unknown_log_level_is_refused(tmp_path: Path) -> None:
    served = Server(tmp_path)
    served.arguments += ["--log-level", "loud"]
    with pytest.raises(StartFailed, match="must be DEBUG or INFO or WARNING or ERROR"):
        served.start()
