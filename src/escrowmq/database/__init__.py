"""What all database bindings share: `escrowmq.sql`, `.django` and `.dbapi` are built on it.

A binding runs one database transaction and any number of messages together: both take effect, or
neither does.

1. Begin.   The binding opens a database transaction and inserts a marker row with the
            transaction's id.                                     (transaction.py, marker.py)
2. Work.    The application changes its tables and sends messages. The broker parks them as half
            messages. Each send first proves that the database transaction is still that of the
            marker. Messages of a savepoint get a marker inside it.  (transaction.py, owner.py)
3. Commit.  The database commits the work and the marker together. Then the binding tells the
            broker the verdict. After an error it asks the marker first.     (transaction.py)
4. Check.   If the verdict does not arrive, because the process died or the network failed, the
            broker asks any process of the group. The marker row is the answer.   (marker.py)
5. Purge.   Markers that no check can need any more are deleted in the background, by the clock of
            the database.                                           (retention.py, marker.py)

    application ── work ──> database: rows + marker ── commit
         │                                ▲
         └─ send ──> broker: halves ── check: is the marker there?

What always holds:
  - a message is delivered if and only if the marker of its transaction is committed;
  - the answer to a check never changes: a checker that finds no marker inserts a tombstone in
    its place, which makes a late owner fail.

A transaction that the application begins and ends itself can be joined: its first message inserts
the marker, and the binding learns from its database library how the transaction ended.

    marker.py        the rules of the marker
    transaction.py   the steps of a transaction, and its messages
    owner.py         what a send and the end of a transaction do to the markers
    retention.py     which rows may be deleted, and the inboxes' loop
    statements.py    the SQL of the bindings without SQLAlchemy

Read marker.py first, then transaction_steps() in transaction.py.
"""
