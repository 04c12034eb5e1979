"""The demo of `make demo`, whole: it judges itself, and exits with 0 only if all held."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_finds_that_nothing_promised_was_lost(seed: int) -> None:
    command = [sys.executable, "-m", "escrowmq.cli.demo", "--seed", str(seed)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "killed with SIGKILL" in result.stdout
    assert "torn end" in result.stdout
    assert result.stdout.rstrip().endswith("nothing promised was lost")
