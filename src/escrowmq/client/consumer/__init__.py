"""Consumers: receive messages as a member of a group, or read queues by hand.

1. Join.       A heartbeat tells the brokers the group and its subscriptions. Every member computes
               which queues are its own.                                        (rebalance.py)
2. Start.      For each queue the committed offset is read, or the start is looked up.
                                                                             (offset_store.py)
3. Fetch.      One task for each queue pulls messages while the limits allow it.  (fetcher.py)
4. Deliver.    The queues take turns. A message goes to a handler, an iterator or a poll.
                                         (consumer.py, handlers.py, pull_consumers.py)
5. Done.       An acknowledged message leaves the set of messages in flight. One that failed is
               sent back to the broker, which delivers it again later.       (queue_client.py)
6. Commit.     Every five seconds the offset of the first message not done is stored.

    broker ──pull──> QueueFetcher ──> DeliveryQueue ──> Consumer ──> handler or iterator
       ▲                  ▲                                │
       │                  └────────── mark_done ───────────┤
       └── commit, send back ──────────────────────────────┘

What always holds:
  - a message is delivered at least once, whatever process dies;
  - the committed offset never passes a message that is not done;
  - an orderly consumer has at most one message of a queue delivered, and holds the queue's lock.

Modules, in reading order:

    consumer.py         Consumer: push, by handlers or iteration
    pull_consumers.py   LiteConsumer and PullConsumer
    rebalance.py        membership, assignment of queues, locks
    fetcher.py          pulls of one queue, messages in flight, delivery order
    offset_store.py     start offsets and committed offsets
    queue_client.py     requests about one queue
    handlers.py         functions that process messages
    broker_requests.py  requests that a broker sends to a consumer
"""
