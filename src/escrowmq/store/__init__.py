"""The append-only store, in RocketMQ's file format.

    disk.py          the only file calls
    commitlog.py     the log: the truth; message/record.py has the bytes of one record
    consumequeue.py  queue offset -> log offset, derived
    keyindex.py      key -> log offset, derived; redo.py makes its changes all or nothing
    checkpoint.py    what is known to be durable, so that the next start is short
    recover.py       open a directory after anything
    store.py         all of it together: append, flush, checkpoint; reads.py and read.py: reading
    expire.py        forget what is old
    configfiles.py   topics, groups and offsets
    check*.py        examine a directory and say what is wrong with it

Read `store.py` first, then `recover.py`.
"""
