"""What the README shows, run as it stands: its Python prints what the comments beside it say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.brokers import Server

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with Server(tmp_path) as served:
        code = shown.replace("127.0.0.1:9876", served.namesrv_address)
        assert code != shown
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    said = [line.split("# ")[1] for line in code.splitlines() if line.lstrip().startswith("print")]
    assert done.stdout.splitlines() == said


def test_every_target_that_the_readme_names_is_a_target() -> None:
    makefile = (README.parent / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    assert {"demo", "test", "bench"} <= named
    assert {target for target in named if f"\n{target}:" not in makefile} == set()
