"""The client: producers, transactions and consumers over asyncio. It knows the wire, no broker.

line          one connection: calls, answers, and what the broker asks of us
lines         the connections of a client, by address
routes        which broker has which queue of a topic, from the name servers
messages      what is sent, what is received
producer      send, and everything that keeps a send going
transaction   a block that commits, rolls back, or leaves it to check-back
checkers      answers to the broker's questions

consumer      messages of a group, iterated over or handed to functions
lite          messages in batches, read from where its user says
puller        queues by hand
member        which queues are whose, and a pull for each; with membership, assignment, pulling,
              hand, limits, waiting, places, calls, filters, backwards, handlers, answering
"""
