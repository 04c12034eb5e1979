"""Pipelines on Spark over topics and transactions: `escrowmq pipeline …`, and as functions.

    brokers ── Spark source ──> ledger (one row per transaction) ──┐
                                                                   ├─> reconcile ──> report
    databases (markers, inboxes, books) ───────────────────────────┘
    brokers ── Spark source ──> archive (Parquet by hour) ──> replay ──> brokers

What always holds: a pipeline that was interrupted continues where it was and does nothing twice;
readers of a table see a batch completely or not at all; days and hours are UTC.

  job.py                    session, cluster check, one-line errors, progress, streams into tables
  parquet_table.py          a table of Parquet parts with a manifest that is replaced atomically
  ledger/model.py           records of brokers to one row per transaction: pure functions
  ledger/job.py             keep a ledger up to date, day by day
  ledger/table_formats.py   copies of the ledger as Delta or Iceberg tables
  archive.py                topics to Parquet, and back into a topic
  reconcile/databases.py    tables of business databases as DataFrames
  reconcile/compare.py      the rules: what is a difference between ledger and databases
  reconcile/job.py          run a comparison and summarise it
  reconcile/report.py       the summary as an HTML page
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from escrowmq.pipeline.archive import ReplayRequest, read_archive, run_archive, run_replay
    from escrowmq.pipeline.job import ClusterSource
    from escrowmq.pipeline.ledger.job import read_ledger, run_ledger
    from escrowmq.pipeline.reconcile.compare import ReconcileLimits
    from escrowmq.pipeline.reconcile.job import ReconcileRequest, run_reconcile

__all__ = [
    "ClusterSource",
    "ReconcileLimits",
    "ReconcileRequest",
    "ReplayRequest",
    "read_archive",
    "read_ledger",
    "run_archive",
    "run_ledger",
    "run_reconcile",
    "run_replay",
]

# Imported on first use: these modules need PySpark, which the command line can do without.
_MODULES: Final = {
    "ClusterSource": "job",
    "ReconcileLimits": "reconcile.compare",
    "ReconcileRequest": "reconcile.job",
    "ReplayRequest": "archive",
    "read_archive": "archive",
    "read_ledger": "ledger.job",
    "run_archive": "archive",
    "run_ledger": "ledger.job",
    "run_reconcile": "reconcile.job",
    "run_replay": "archive",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
