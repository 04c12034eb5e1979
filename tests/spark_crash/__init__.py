"""Kill Spark and the broker at every step of an exactly-once write, and count the rows.

    python -m tests.spark_crash --runs 200 --seed 1

A stream of a few epochs goes into a topic of its own. In each epoch something is killed with -9,
once, at a named point: that is one run. Whatever died is started again, and the query with it, from
its checkpoint. Then every row is there once, or the run failed.
"""
