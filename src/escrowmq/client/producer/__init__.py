"""Producers: send messages, alone or in transactions.

1. Encode.  Properties become text, a long body is compressed.                    (sender.py)
2. Send.    A queue is chosen, slow brokers are avoided, a failed attempt is repeated on another
            broker.                                                               (sender.py)
3. Park.    In a transaction, messages are sent as half messages, which no consumer reads.
                                                                             (transaction.py)
4. End.     Leaving the block sends the verdict to all brokers concerned.    (transaction.py)
5. Check.   If a broker did not get the verdict, it sends a check to a producer of the group, and
            a checker answers.                                                   (checker.py)

    Producer ── transaction() ──> Transaction ── send() ──> MessageSender ── SEND_MESSAGE_V2 ──┐
       │                              └── end() ──> TransactionEnder ── END_TRANSACTION ───> broker
       └── checker() ──> CheckerRegistry <──────── CHECK_TRANSACTION_STATE ────────────────────┘

What always holds:
  - the first half message is stored before the block of a transaction runs;
  - a verdict is sent again only where that cannot deliver a message twice;
  - every check is answered, with UNKNOWN if nothing better is known.

Modules, in reading order:

    producer.py              Producer: puts the others together
    sender.py                encoding, batches, choice of a queue, retries
    transaction.py           Transaction, and the requests that end it
    checker.py               checkers and the answers to checks
    transaction_producer.py  TransactionProducer: transactions with a listener, as in RocketMQ
    request_reply.py         requests that a consumer replies to
"""
