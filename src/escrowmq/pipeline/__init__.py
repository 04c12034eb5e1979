"""What people run on Spark over topics and transactions: `escrowmq pipeline …`, and as functions.

Read in this order:
  1. ledger_schema.py  the ledger's columns
  2. ledger.py         records to rows: functions over DataFrames
  3. tables.py         tables that grow while others read them
  4. sources.py        streams of a cluster into such tables
  5. ledger_run.py     a ledger that is kept up to date; ledger_days.py: which days are touched
  6. archive.py, replay.py
  7. reconcile.py      the ledger against databases; report.py: for a manager
  8. session.py, progress.py
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from escrowmq.pipeline.archive import ReplayRequest, read_archive, run_archive, run_replay
    from escrowmq.pipeline.job import ClusterSource
    from escrowmq.pipeline.ledger.job import read_ledger, run_ledger

__all__ = [
    "ClusterSource",
    "ReplayRequest",
    "read_archive",
    "read_ledger",
    "run_archive",
    "run_ledger",
    "run_replay",
]

# Imported when they are used: they need PySpark, and the command line does not.
_MODULES: Final = {
    "ClusterSource": "job",
    "ReplayRequest": "archive",
    "read_archive": "archive",
    "read_ledger": "ledger.job",
    "run_archive": "archive",
    "run_ledger": "ledger.job",
    "run_replay": "archive",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
