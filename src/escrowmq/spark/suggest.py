"""The name that somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(given: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or nothing."""
    by_folded = {name.lower(): name for name in known}
    found = get_close_matches(given.lower(), by_folded, n=1, cutoff=0.6)
    return f"; did you mean {by_folded[found[0]]}?" if found else ""
