"""Handlers that do their work in slices, in tests that want the result at once."""

from __future__ import annotations

from escrowmq.sliced_work import SlicedWork, run_to_end


def finish(work: SlicedWork | None) -> None:
    """Do the rest of a request, as a server does while the connection is open."""
    if work is not None:
        run_to_end(work)
