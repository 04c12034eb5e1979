"""The ledger: one row per transaction."""
