"""docs/from-rocketmq-java.md: every name that it leads to exists, and its programs run."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import escrowmq
from tests.support.brokers import Server

PAGE = Path(__file__).parents[2] / "docs" / "from-rocketmq-java.md"
# `Producer.send`, `Producer(retries=)`, `Producer.send(queue=)`, `admin.queries.topic_offsets`
NAME = re.compile(r"`([A-Za-z_.]+)(?:\((\w+)=\))?`")


def names_of_tables() -> list[tuple[str, str]]:
    """Return the names in the second column of each table, with the parameter if one is given."""
    names: list[tuple[str, str]] = []
    for line in PAGE.read_text().splitlines():
        # A pipe within a cell is escaped.
        cells = re.split(r"(?<!\\)\|", line)
        if line.startswith("|") and len(cells) > 3:
            names += NAME.findall(cells[2])
    return sorted(set(names))


def resolve(name: str) -> Any:
    """Return the class, function or attribute that the page calls by this name."""
    parts = name.split(".")
    if parts[0] in ("admin", "errors"):
        module_parts = [part for part in parts if part.islower()]
        if parts[-1].islower():
            module_parts.pop()
        value: Any = importlib.import_module(".".join(["escrowmq", *module_parts]))
        parts = parts[len(module_parts) :]
    else:
        value = getattr(escrowmq, parts.pop(0))
    for part in parts:
        fields = getattr(value, "__dataclass_fields__", {})
        value = getattr(value, part) if part not in fields else fields[part]
    return value


@pytest.mark.parametrize(("name", "parameter"), names_of_tables())
def test_a_name_of_the_page_exists(name: str, parameter: str) -> None:
    value = resolve(name)
    if parameter:
        parameters = inspect.signature(value).parameters
        assert parameter in parameters, f"{name} has no parameter {parameter}"


def test_the_page_names_every_class_of_the_client() -> None:
    named = {name.partition(".")[0] for name, _ in names_of_tables()}
    classes = {"Producer", "TransactionProducer", "Consumer", "LiteConsumer", "PullConsumer"}
    assert classes | {"Message", "ReceivedMessage", "SendResult", "SqlFilter", "admin"} <= named


def test_the_programs_of_the_page_print_what_they_say(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    with Server(tmp_path) as server:
        program = "\n".join(blocks).replace("127.0.0.1:9876", server.namesrv_address)
        process = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert process.returncode == 0, process.stderr
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", program, re.MULTILINE)
    assert len(expected) == program.count("print(")
    assert process.stdout.splitlines() == expected
