"""Reconciliation: compare the ledger with the databases of producers and consumers.

  ledger ───────────────────────────┐
  databases ── databases.py ────────┴─> compare.py ── differences ──> job.py ──> report.py

databases.py   marker, inbox and business tables as DataFrames, over JDBC or SQLAlchemy
compare.py     inputs, and the rules that say what is a difference
job.py         a whole run: read, compare, count
report.py      the HTML page; its layout is in templates/
"""
