"""What an object still holds when it should hold nothing."""

from __future__ import annotations

from collections.abc import Collection


def leftovers(holder: object) -> dict[str, Collection[object]]:
    """Return the attributes of an object that are collections with something in them.

    Entries that nobody can reach any more show in no answer, only in memory. All attributes are
    looked at, whatever their names are, so that a table that is added later is checked too.
    """
    return {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, Collection) and len(value)
    }
