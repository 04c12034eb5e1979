"""A Spark driver that runs one query after the other, as it is told on its standard input.

{"jvm": …}                                                             it is up: the id of its JVM
{"servers": …, "topic": …, "checkpoint": …, "count": …, "step": …}     one line each
{"end": "done" | "failed: why", "starts": …, "slow": …}                the answer

`starts`: how often the query was started in this process. `slow`: how often of these Spark gave up
on a Python process that was not up in ten seconds, for which it has no setting. Nothing was written
then and nobody was killed: the query is started again, and that counts as no failure.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from escrowmq.spark import local_session
from tests.spark_crash.points import DIRECTORY, DRIVER_PIDS, note_pids
from tests.spark_crash.source import CrashDataSource
from tests.support.spark_session import SETTINGS, SLOW_START

JAVA_OPTIONS = "ESCROW_CRASH_JAVA"  # like -XX:SharedArchiveFile=… -Xlog:disable
_QUICKLY = SETTINGS["spark.driver.extraJavaOptions"]
TRIES = 20  # a query fails once for each kill
SLOW_STARTS = 40


def main() -> None:
    spark = local_session(
        "crash",
        master=sys.argv[1],
        settings={
            **SETTINGS,
            "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
            f"spark.executorEnv.{DIRECTORY}": os.environ[DIRECTORY],
            "spark.executor.memory": "512m",
            "spark.driver.extraJavaOptions": f"{_QUICKLY} {os.environ.get(JAVA_OPTIONS, '')}",
            "spark.executor.extraJavaOptions": _QUICKLY,
            "spark.sql.streaming.stopTimeout": "60s",
        },
    )
    spark.dataSource.register(CrashDataSource)
    # PySpark has no public name for its JVM.
    jvm: Any = spark.sparkContext._jvm
    pids = (os.getpid(), jvm.java.lang.ProcessHandle.current().pid())
    say(json.dumps({"jvm": pids[1]}))
    for line in sys.stdin:
        note_pids(Path(os.environ[DIRECTORY]) / DRIVER_PIDS, *pids)
        say(json.dumps(run(spark, json.loads(line))))


def run(spark: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Until it has come to its end; a query that failed is started again, as a person would."""
    why, failures, slow = "", 0, 0
    while failures < TRIES and slow < SLOW_STARTS:
        rows = spark.readStream.format("crash").option("count", wanted["count"])
        rows = rows.option("step", wanted["step"]).load()
        sink = rows.writeStream.format("crash").option("servers", wanted["servers"])
        sink = sink.option("topic", wanted["topic"]).option("batchBytes", 2000)
        sink = sink.option("guarantee", "exactly-once").option("timeout", 60)
        query = sink.option("checkpointLocation", wanted["checkpoint"]).trigger(availableNow=True)
        try:
            query.start().awaitTermination()
        except Exception as error:  # whatever it was, a driver tells, and goes on
            why = str(error).replace("\n", " ")
            if is_taken_over(why):
                break
            if SLOW_START in why:
                slow += 1
            else:
                failures += 1
        else:
            return {"end": "done", "starts": 1 + failures + slow, "slow": slow}
    return {"end": f"failed: {why}", "starts": failures + slow, "slow": slow}


def is_taken_over(why: str) -> bool:
    """Another driver has the checkpoint: Spark or the sink has noticed."""
    return "WriterFenced" in why or "CONCURRENT" in why


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
