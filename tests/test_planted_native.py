"""The mistakes that `make planted` plants in the native path can still be planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted_native.mistakes import MISTAKES, Mistake

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_text_that_a_mistake_replaces_occurs_once(mistake: Mistake) -> None:
    assert (ROOT / mistake.path).read_text(encoding="utf-8").count(mistake.old) == 1
    assert mistake.new != mistake.old


def test_mistakes_have_different_names() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES)
