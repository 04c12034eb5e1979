"""The name server: which broker has which topic, and where it is. No I/O.

A broker registers over a line it keeps, and again every 30 s. It is forgotten when it says so, when
its line closes, or when it has been silent for too long.

    routes.py        the table: brokers, their addresses, their topics
    settings.py      keys and values that operators keep here
    namesrv.py       one request in, one answer out
    registration.py  the other end: what a broker tells a name server, ours or Apache's
"""
