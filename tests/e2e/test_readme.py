"""Programs of the documentation, run as they stand: they print what their comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.brokers import Server

README = Path(__file__).parents[2] / "README.md"
LISTENER = "### With a listener"  # the heading in docs/client.md


@pytest.mark.parametrize(("page", "heading"), [("README.md", ""), ("docs/client.md", LISTENER)])
def test_a_program_of_the_documentation_prints_what_it_says(
    page: str, heading: str, tmp_path: Path
) -> None:
    _, _, section = (README.parent / page).read_text().partition(heading or "# ")
    [program, *_] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    with Server(tmp_path) as served:
        code = program.replace("127.0.0.1:9876", served.namesrv_address)
        assert code != program
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert run.returncode == 0, run.stderr
    prints = [line for line in code.splitlines() if line.lstrip().startswith("print")]
    assert prints
    assert run.stdout.splitlines() == [line.split("# ")[1] for line in prints]


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    assert {"demo", "test", "bench"} <= targets
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
