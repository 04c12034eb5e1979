"""The client: producers, transactions and consumers over asyncio. It knows the wire, no broker.

access        who we are, and TLS
line          one connection: calls, answers, and what the broker asks of us
lines         the connections of a client, by address
routes        which broker has which queue of a topic, from the name servers
messages      what is sent, what is received
namespace     names of tenants

packing       a message as it goes out: properties, compression
batches       many of them in one request
sending       one request to one queue, and its answer
faults        which brokers to pass over, and for how long
presence      being known to the brokers
sender        get it stored, again if that may help
producer      all of it, for users

transaction   a block that commits, rolls back, or leaves it to check-back
listener      the same, as RocketMQ's clients write it
ending        tell the brokers the verdict
checkers      answers to the broker's questions

consumer      messages of a group, iterated over or handed to functions
lite          messages in batches, read from where its user says
puller        queues by hand
member        which queues are whose, and a pull for each; with membership, assignment, pulling,
              hand, limits, waiting, places, calls, filters, backwards, handlers, answering

telemetry     traces, for those who have OpenTelemetry
loopthread    a loop in a thread, for escrowmq.blocking; and what a fork does to it
"""
