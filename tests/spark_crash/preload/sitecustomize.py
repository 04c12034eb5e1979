"""Import the data source in Spark's Python daemons.

Python runs this module at its start if the directory is on its path. Spark forks a process from a
daemon for every step of an epoch; the forked process need not import these modules again.
"""

from __future__ import annotations

import sys

if "pyspark.daemon" in sys.orig_argv:
    import tests.spark_crash.source  # noqa: F401
