"""What an application does not use is not imported, and need not be installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from escrowmq.app import App

app = App("127.0.0.1:1", group="g")

@app.on("t")
def handle(payload: dict[str, int]) -> None: ...

import escrowmq.app.worker
from escrowmq.cli.commands.worker import worker
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_an_app_without_a_database_needs_none_of_the_extras() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = set(result.stdout.split())
    assert "escrowmq" in loaded
    assert loaded.isdisjoint({"sqlalchemy", "django", "pydantic", "aiohttp", "pyspark"})
