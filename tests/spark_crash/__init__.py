"""Kill Spark and the broker at every step of an exactly-once write, and count the rows.

    python -m tests.spark_crash --runs 200 --seed 1
    python -m tests.spark_crash --runs 30 --only "driver decide" --only executor --seconds 200
    python -m tests.spark_crash --runs 30 --foreach-batch

A streaming query writes a few epochs to its own topic. In each epoch one process is killed with
SIGKILL at a named point: that is one run. The process and the query are started again, and the
query continues from its checkpoint. In the end every row must be stored exactly once.

A run counts if its victim was observed to end. Otherwise it is repeated, and the table includes
both attempts: lost or duplicate rows of any attempt are failures.

Each killed driver needs a new start of Java, which takes most of the time. ESCROW_CRASH_JAVA may
have additional options of Java, such as "-Xlog:disable -XX:SharedArchiveFile=FILE".

Read in this order:
  1. points.py    the named points of a write, and the hooks that kill a process there
  2. source.py    the data source of a run: numbered rows, and the sink with hooks
  3. job.py       the program of a driver; drivers.py starts and ends drivers
  4. cases.py     victims and points, their order, outcomes and the table
  5. runs.py      the runs: broker, driver, restarts, and the count of rows
"""
