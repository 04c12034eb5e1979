"""The message store: an append-only log on disk, in RocketMQ's file format.

    append --> commit log (the truth)
                 |  derived from it, in memory until the next checkpoint
                 +--> consume queues   queue offset --> log offset
                 +--> key index        key --> log offset

1. Open.        Lock the directory, find the end of the log, rebuild what does not agree with it.
                                                                    (recovery.py, checkpoint.py)
2. Append.      Encode records for their log offsets and write them in one call.
                                                          (store.py, commit_log.py, columns.py)
3. Flush.       One fsync of the log makes everything appended before durable.
4. Read.        Queue entries and a filter become slices of the log.            (queue_reader.py)
5. Checkpoint.  Log, queue entries and keys become durable, in this order; then a small file says
                so, and the next start reads only what follows.  (consume_queue.py, key_index.py)
6. Expire.      Old segments are removed, and after the next checkpoint their queue and index
                files.                                                            (retention.py)

What always holds:
  - the log is the only truth: queues and index can be rebuilt from it;
  - an append is in the log completely or not at all; a crash leaves the first n of its records;
  - what was flushed and is invalid now is damage: it is reported and skipped, never cut off;
  - a record is found by what the store knows, never by searching for bytes that look like one;
  - a durable queue entry or key never refers to a record that is not durable;
  - after a failed fsync nothing more is accepted until the next start;
  - whatever is read from a file is checked: a flipped bit is found, reported, and repaired from the
    log or from a copy; only a damaged record is lost, and only itself;
  - no file is mapped into memory: a bad sector is an error of one read;
  - only disk.py calls the operating system, so tests run the store on disks that fail on command.

Modules in reading order:

    store.py          the store: append, flush, checkpoint
    store_reader.py   its reading side: by queue, offset, key and time
    recovery.py       open a directory after a crash
    log_scan.py       read a log from record to record, past damage
    flush_marks.py    how far the log was durable
    commit_log.py     segments, batches of records, flushes (message/record.py: the record itself)
    consume_queue.py  queues, the table of all queues, deleted topics
    queue_blocks.py   blocks of queue files, checked when they are read
    queue_repair.py   compare queue entries with the log, and repair them
    log_reads.py      records that were just appended, and checks of those read from the disk
    queue_reader.py   read a queue with a filter and limits
    key_index.py      index files and their redo file
    index_checksums.py  checksums of index files
    columns.py        hash keys and pack entries, many at once
    checkpoint.py     what is durable, ours and RocketMQ's
    snapshot_files.py files that shorten a start
    damage.py         what was found to be damaged, for log, metric and doctor
    retention.py      remove old segments
    log_ages.py       how old the parts of the log are, whatever the clock shows
    disk.py           the only file calls
    config_files.py   topics, groups and offsets in config/*.json; deleted topics
    log_files.py      read a log without owning it
    check.py          check a directory and report what is wrong with it
    check_log.py      ... its log, and how findings are collected
    check_indexes.py  ... its queues and key index
    backup.py         copy a store that may be in use, and restore it
"""
