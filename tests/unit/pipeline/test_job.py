"""Errors of Spark are shortened to one line when a pipeline fails."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import translate_spark_errors

JOB = """An error occurred while calling o45.parquet.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 5.0 failed
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 3228, in main
    process()
{reason}

	at org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(x.scala)
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            Py4JError(JOB.format(reason="ModuleNotFoundError: No module named 'sqlalchemy'")),
            "ModuleNotFoundError: No module named 'sqlalchemy'",
        ),
        (
            PySparkException(
                JOB.format(reason="escrowmq.errors.NoRoute: there is no topic orders")
            ),
            "there is no topic orders",
        ),
        (
            Py4JError("Answer from Java side is empty\nand more"),
            "Answer from Java side is empty",
        ),
        (PySparkException(" "), "PySparkException"),
    ],
)
def test_an_error_is_one_line(error: Exception, reason: str) -> None:
    with pytest.raises(PipelineFailed) as failed, translate_spark_errors():
        raise error
    assert str(failed.value) == reason
