"""Spark: topics as tables, tables as topics."""
