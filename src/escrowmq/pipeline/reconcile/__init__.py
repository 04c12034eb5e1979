"""Reconciliation: compare the ledger with databases."""
