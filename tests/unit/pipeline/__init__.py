"""Pipelines without Spark."""
