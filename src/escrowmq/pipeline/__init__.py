"""Pipelines that people run, on Spark."""
