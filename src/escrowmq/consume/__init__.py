"""The reading side, in the order things happen. No socket, file or clock: values in, values out.

1. Join.    A client's heartbeat says which groups it belongs to and what each group wants of which
            topic. A group that changed is told, and its members share the queues out among
            themselves; the broker only keeps the list.                             (groups.py)
2. Begin.   A member asks how far its group has read a queue, or is told that nobody knows. An
            orderly one locks the queue first.                           (offsets.py, locks.py)
3. Pull.    It asks for the messages of a queue from an offset on. We refuse, or read the store
            with the filter of its subscription, and name the result.  (pull.py, subscription.py)
4. Wait.    Nothing there yet: the pull is held until a message comes that it wants, or until its
            time is over.                                                          (waiting.py)
5. Fail.    A message that could not be processed is sent back: to the group's retry topic, later
            and later, and in the end to its dead letters.                           (retry.py)
6. Commit.  It tells how far it has come; 2 answers with that next time.           (offsets.py)

What holds at every moment:
  - a client is a member from its heartbeat until it says goodbye, its line closes or 120 s pass;
  - a held pull is answered once, or its line has closed; it is never forgotten;
  - every table has a bound, and reaching it changes nothing.

Read subscription.py, pull.py and waiting.py first: together they are one pull. Then groups.py
(members.py is the table below it), offsets.py, locks.py, retry.py.
"""
