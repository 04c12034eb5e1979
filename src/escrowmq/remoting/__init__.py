"""RocketMQ's remoting protocol as values: bytes in, requests and responses out, and back. No I/O.

    received bytes -> frame -> command -> typed header -> Request -> handler
                                                                        |
        bytes to send <- frame <- command <- typed header <- response <-'

1. A stream is split into frames. The first frame that breaks the rules ends the connection.
2. The header of a frame is decoded from one of two encodings to a struct, its type given by the
   request code. For JSON, a fast path does this in one step.
3. A connection matches responses to the requests it has sent; either end may send requests.
4. A response is encoded as its request was.

What always holds: a request is either decoded completely or refused with a code and a remark; the
fast paths produce the same values and bytes as the plain ones, which property tests compare;
unknown keys of newer peers are ignored.

Modules, in reading order:

    codes.py          numbers on the wire: requests, responses, flags, languages
    frame.py          split a stream into frames
    foreign_protocols.py  recognise other protocols, for the errors of a wrong port
    command.py        a header and its two encodings, JSON and ROCKETMQ
    headers.py        typed headers of clients and brokers; `@request` ties them to request codes
    headers_admin.py  typed headers of administration and of the name server
    requests.py       `Request`, the headers of each request code, the fast decoder
    connection.py     the state of one connection: calls and their responses
    responses.py      encode responses; templates for the frequent ones
    bodies.py         bodies of clients, name servers and transactions
    bodies_admin.py   bodies of administration
"""
