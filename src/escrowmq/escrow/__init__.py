"""The transaction protocol. No socket, file or clock: time is an argument, records are returned.

    send ──▶ park ──▶ OPEN ── decide ──▶ COMMITTED: [final, op] appended
                       │  │          └─▶ ROLLED_BACK: [op] appended
                       │  └── due ──▶ next_step ──▶ check, and the answer decides
                       └───── checked too often, too old ──▶ STRANDED, an operator decides

1. Park.     A transactional message is stored as a half where no consumer reads. It gets a place
             in the table and a time for its first check.   (coordinator.py, half_table.py)
2. Decide.   The verdict of its producer becomes records: the final, which is the message in its
             own topic, and the op, which says that the half is done.   (coordinator.py, records.py)
3. Check.    If no verdict comes, the producer group is asked.   (checks.py)
4. Batch.    A writer decides many halves with one decision record.   (writers.py)
5. Recover.  At a start, all of this is rebuilt from the log.   (recovery.py)

What always holds:
  - memory follows the log: a half is decided when its op (or a decision record) is stored;
  - final and op are one append, so a crash leaves both, or the final as the last record;
  - a half is decided once. The same verdict again gets the same result, another one is refused;
  - every half that the log holds has a state, two bits of memory.

Read in this order:
    half_table.py    undecided halves, the states of all halves, cached finals
    records.py       halves, finals, ops and journal entries as records
    checks.py        `next_step()`, the schedule and the backlog of checks
    writers.py       writers, batches, fences
    decisions.py     what deciding returns
    coordinator.py   the protocol itself
    snapshot.py      what shortens a start
    recovery.py      the same state again, from the log
"""
