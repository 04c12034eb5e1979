"""A Spark driver that runs queries from its standard input, one after the other.

{"jvm": …}                                                            output: process id of its JVM
{"servers": …, "topic": …, "checkpoint": …, "count": …, "step": …,    input: a query
 "is_foreach_batch": …}
{"result": "done" | "failed: reason", "starts": …, "slow": …}         output: its result

`starts` is how often the query was started in this process. `slow` is how often Spark gave up
because a Python process did not start in ten seconds, which is not configurable. In this case
nothing was written and no process was killed, so the query is started again, and this is not a
failure.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from escrowmq.spark import foreach_batch_writer, local_session
from tests.spark_crash.points import DIRECTORY, DRIVER_PIDS, write_pids
from tests.spark_crash.source import CrashDataSource, HookedSink
from tests.support.spark_session import SETTINGS, SLOW_START

JAVA_OPTIONS = "ESCROW_CRASH_JAVA"  # for example -XX:SharedArchiveFile=… -Xlog:disable
_FAST_START = SETTINGS["spark.driver.extraJavaOptions"]
FAILURES_MAX = 20  # a query fails once for each kill
SLOW_STARTS_MAX = 40


def main() -> None:
    spark = local_session(
        "crash",
        master=sys.argv[1],
        settings={
            **SETTINGS,
            "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
            f"spark.executorEnv.{DIRECTORY}": os.environ[DIRECTORY],
            "spark.executor.memory": "512m",
            "spark.driver.extraJavaOptions": f"{_FAST_START} {os.environ.get(JAVA_OPTIONS, '')}",
            "spark.executor.extraJavaOptions": _FAST_START,
            "spark.sql.streaming.stopTimeout": "60s",
        },
    )
    spark.dataSource.register(CrashDataSource)
    spark.dataSource.register(HookedSink)
    # PySpark has no public name for its JVM.
    jvm: Any = spark.sparkContext._jvm
    pids = (os.getpid(), jvm.java.lang.ProcessHandle.current().pid())
    print_line(json.dumps({"jvm": pids[1]}))
    for line in sys.stdin:
        write_pids(Path(os.environ[DIRECTORY]) / DRIVER_PIDS, *pids)
        print_line(json.dumps(run(spark, json.loads(line))))


def run(spark: Any, query: dict[str, Any]) -> dict[str, Any]:
    """Run a query until it is complete. Starts it again after a failure, as an operator would."""
    reason, failures, slow = "", 0, 0
    while failures < FAILURES_MAX and slow < SLOW_STARTS_MAX:
        rows = spark.readStream.format("crash").option("count", query["count"])
        rows = rows.option("step", query["step"]).load()
        stream = rows.writeStream.option("checkpointLocation", query["checkpoint"])
        options = {name: query[name] for name in ("servers", "topic")}
        options |= {"batchBytes": 2000, "guarantee": "exactly-once", "timeout": 60}
        if query["is_foreach_batch"]:
            sink = stream.outputMode("update").foreachBatch(foreach_batch_writer(**options))
        else:
            sink = stream.format("crash").options(**options)
        try:
            sink.trigger(availableNow=True).start().awaitTermination()
        except Exception as error:  # any failure is reported, and the query started again
            reason = str(error).replace("\n", " ")
            if is_taken_over(reason):
                break
            if SLOW_START in reason:
                slow += 1
            else:
                failures += 1
        else:
            return {"result": "done", "starts": 1 + failures + slow, "slow": slow}
    return {"result": f"failed: {reason}", "starts": failures + slow, "slow": slow}


def is_taken_over(reason: str) -> bool:
    """Return whether a query failed because another driver uses its checkpoint."""
    return "WriterFenced" in reason or "CONCURRENT" in reason


def print_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
