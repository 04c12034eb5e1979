"""Python runs this before anything else, where the directory is on its path. Spark forks a process
for every step of an epoch: what its daemons have imported, these need not import again."""

from __future__ import annotations

import sys

if "pyspark.daemon" in sys.orig_argv:
    import tests.spark_crash.source  # noqa: F401
