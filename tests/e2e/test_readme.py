"""The Python program of the README prints what its comments say; and its make targets exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.brokers import Server

README = Path(__file__).parents[2] / "README.md"


def test_the_program_of_the_readme_prints_what_its_comments_say(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    with Server(tmp_path) as served:
        code = program.replace("127.0.0.1:9876", served.namesrv_address)
        assert code != program
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stderr
    prints = [line for line in code.splitlines() if line.lstrip().startswith("print")]
    assert result.stdout.splitlines() == [line.split("# ")[1] for line in prints]


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    assert {"demo", "test", "bench"} <= targets
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
