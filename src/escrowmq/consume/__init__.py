"""Consumers as the broker sees them. No socket, file or clock: values in, values out.

    heartbeat --> members.py          pull --> pull.py --> filter --> (the store is read)
                    |                              ^                     |          |
                    v                       subscription.py            found      nothing
              subscriptions ----------------------^  sql92/              |          v
                                                                     response   long_polling.py

1. Join.    The heartbeat of a client names its groups and their subscriptions. If a group has
            changed, its members are notified and rebalance: they share the queues among
            themselves. The broker only stores who is a member.                     (members.py)
2. Begin.   A member queries how far its group has read a queue. An orderly consumer locks the
            queue first.                                              (offsets.py, members.py)
3. Pull.    A member requests the messages of a queue from an offset on. The broker refuses, or
            reads the store with the filter of the subscription and names the result.
                                            (pull.py, subscription.py; sql92/ compiles SQL92)
4. Wait.    If there is no message yet, the pull is held until a message arrives that matches, or
            until its time is over.                                            (long_polling.py)
5. Fail.    A message that could not be processed is sent back. It goes to the retry topic of the
            group with growing delays, and in the end to its dead letter topic.       (retry.py)
6. Commit.  A member commits how far it has come; step 2 returns that next time.     (offsets.py)

What always holds:
  - a client is a member from its heartbeat until it unregisters, its channel closes or 120 s pass;
  - a held pull is responded to exactly once, unless its channel closes; it is never lost;
  - every table has a limit, and a request that would exceed it changes nothing.

Read subscription.py, pull.py and long_polling.py first: together they are one pull. Then read
members.py, offsets.py and retry.py; sql92/ has a page of its own.
"""
