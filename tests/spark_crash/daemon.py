"""Spark's daemon of Python processes, with everything imported that they need: a run starts dozens
of them, and each would import it again."""

from __future__ import annotations

import runpy

import tests.spark_crash.source  # noqa: F401

runpy.run_module("pyspark.daemon", run_name="__main__")
