"""Kill Spark and the broker at every step of an exactly-once write, and count the rows.

    python -m tests.spark_crash --runs 200 --seed 1
    python -m tests.spark_crash --runs 30 --only "driver decide" --only executor --seconds 200

A stream of a few epochs goes into a topic of its own. In each epoch something is killed with -9,
once, at a named point: that is one run. Whatever died is started again, and the query with it, from
its checkpoint. Then every row is there once, or the run failed.

A run counts if its victim was seen dead. If nobody died, it is tried again, and the table has both
tries; rows that were lost or doubled in any of them count.

Java starts once for every driver that is killed, which is most of the time it takes. More options
for it go into ESCROW_CRASH_JAVA, such as "-Xlog:disable -XX:SharedArchiveFile=FILE".
"""
