"""The ledger: one row per transaction of a cluster, kept up to date as Parquet by day.

  brokers ── stream ──> _events/ ── affected days ──> model ──> day=…/ (Parquet)
                                                          └───> delta/ or iceberg/, if asked for

model.py          pure functions: records to events, events to rows; schemas; which days change
job.py            a round: read new records, build the affected days, publish them
table_formats.py  copies of the ledger as a Delta or an Iceberg table
"""
