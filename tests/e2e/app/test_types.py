"""Pyright accepts applications as their users write them, and finds what is wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker_processes import ROOT, WAIT_S

pytestmark = pytest.mark.slow

WRONG = """
from escrowmq.app import App, Retry

app = App("127.0.0.1:9876", group="g", database=7)


@app.on("t", retry=3, concurrency="many")
def handle(text: str) -> None: ...


handle(text=3)
Retry(5)
"""


def pyright_errors(directory: Path, *files: Path) -> list[str]:
    """Return the lines of a report of Pyright in its standard mode, as FILE:LINE RULE."""
    config = {
        "include": [str(file) for file in files],
        "typeCheckingMode": "standard",
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "pythonVersion": "3.11",
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(config))
    result = subprocess.run(
        [
            Path(sys.executable).with_name("basedpyright"),
            *("-p", str(directory), "--outputjson", "--pythonpath", sys.executable),
        ],
        capture_output=True,
        text=True,
        timeout=5 * WAIT_S,
        check=False,
    )
    report = json.loads(result.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files)
    return [
        f"{Path(entry['file']).name}:{entry['range']['start']['line'] + 1} {entry['rule']}"
        for entry in report["generalDiagnostics"]
    ]


def test_examples_with_handlers_have_no_type_errors(tmp_path: Path) -> None:
    programs = [ROOT / "examples" / "app.py", ROOT / "tests" / "support" / "bank_app.py"]
    assert pyright_errors(tmp_path, *programs) == []


def test_a_wrong_option_is_a_type_error_and_a_handler_keeps_its_type(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    assert pyright_errors(tmp_path, program) == [
        "wrong.py:4 reportArgumentType",
        "wrong.py:7 reportArgumentType",
        "wrong.py:7 reportArgumentType",
        "wrong.py:11 reportArgumentType",
        "wrong.py:12 reportCallIssue",
    ]
