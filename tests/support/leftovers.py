"""Find collections of an object that are not empty although they should be."""

from __future__ import annotations

from collections.abc import Collection


def leftovers(holder: object) -> dict[str, Collection[object]]:
    """Return the attributes of an object that are collections and not empty.

    An entry that no request can reach is a memory leak that no response shows. Every attribute is
    checked, whatever its name, so that a table that is added later is checked too.
    """
    return {
        name: value
        for name, value in vars(holder).items()
        if isinstance(value, Collection) and len(value)
    }
