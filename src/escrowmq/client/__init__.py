"""The client: producers, transactions and checkers over asyncio. It knows the wire, not our broker.

access        who we are, and TLS
line          one connection: calls, answers, and what the broker asks of us
lines         the connections of a client, by address
routes        which broker has which queue of a topic, from the name servers
messages      what is sent, what is received
producer      send, and everything that keeps a send going
transaction   a block that commits, rolls back, or leaves it to check-back
checkers      answers to the broker's questions
"""
