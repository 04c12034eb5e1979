"""A message and everything that belongs to it, as values: bytes, properties, ids, names. No I/O.

    fields of a send -> NewRecord -> bytes in the log -> StoredRecord -> message of a consumer

The remoting protocol and the store both build on this package, and neither knows the other. What
always holds: every encoding here is RocketMQ's, byte by byte, and property tests prove that each
decoder reads what its encoder writes and refuses everything else with a typed error.

Modules, in reading order:

    record.py        a message as the log stores it; the bits of the sysFlag
    properties.py    the properties string
    names.py         names of topics, groups and properties
    broker_marks.py  the properties and flags that only a broker may write
    delivery_failure.py  why a delivery failed: what a retry or dead letter keeps of it
    keys.py          message ids, unique keys, tag hashes, the keys of the index
    batch.py         several messages in one request; uniform runs
    compression.py   compressed bodies
    filter.py        filters as users write them
    transaction.py   verdicts and states of a transaction
    topic_config.py  the configuration of a topic and its version
"""
