"""The client: producers, transactions and consumers over asyncio.

It speaks the remoting protocol to EscrowMQ and Apache RocketMQ brokers and imports no broker code.
`escrowmq` exports the public classes; `escrowmq.blocking` wraps them for threads.

1. Find.      A client asks the name servers which brokers have a topic.            (routes.py)
2. Connect.   It opens one connection for each broker, signs its requests if it has an account,
              and registers by a heartbeat.           (connection.py, access.py, heartbeat.py)
3. Produce.   A producer encodes a message, chooses a queue and sends it. In a transaction it
              parks half messages, ends them with a verdict, and answers the broker's checks.
                                                                                  (producer/)
4. Consume.   A consumer divides the queues with the other members of its group, pulls messages,
              delivers them to handlers or an iterator, and commits offsets.      (consumer/)

                      ┌─ producer/ ──────────────┐
    application ──────┤                          ├── heartbeat ── connection ── broker
                      └─ consumer/ ──────────────┘       └─ routes ── name server

What always holds:
  - a call ends once: with a response, NotSent (it had no effect) or OutcomeUnknown (it may have);
  - a message keeps its unique key in every attempt and every delivery;
  - a consumer never commits an offset beyond a message that is not done;
  - a client belongs to the process and event loop that created it;
  - whatever a server answers, a call returns, and fails only with an error of `errors.py`.

Modules, in reading order:

    messages.py         Message, ReceivedMessage, MessageQueue, SendResult; namespaces
    access.py           Access: account and TLS
    callbacks.py        calls functions of the application, which may raise anything
    mistakes.py         sentences for a wrong kind of client, function or argument
    wrong_address.py    why no name server or broker answers at an address
    connection.py       one asyncio connection with its calls; the pool of a client
    topic_route.py      the queues of one topic and the addresses of their brokers
    routes.py           the routes of a client's topics, cached
    heartbeat.py        registration of producers and consumers, members, queue locks
    producer/           see its page
    consumer/           see its page
    telemetry.py        OpenTelemetry spans
    sync_connection.py  a blocking connection without an event loop, for CLI, admin and Spark
    loop_thread.py      the event loop in a thread, for `escrowmq.blocking`
    termination.py      SIGTERM while a consumer is open
"""
