"""The name server: it tells clients which broker has a topic and at which address. No I/O.

    broker  --REGISTER_BROKER-->  NameServer.handle  -->  RouteTable   every 30 s, and on changes
    client  --GET_ROUTEINFO---->  NameServer.handle  <--  RouteTable

1. A broker connects and registers its address and topics over a connection that stays open.
2. Clients ask for the route of a topic and connect to the brokers in it.
3. A broker is removed when it unregisters, when its connection closes, or when no heartbeat came
   for two minutes. Its topics go with it.

What always holds: a topic has at least one live broker; a refused request has changed nothing; the
table is only in memory, because brokers register again after a restart of the name server. The only
thing stored is the key-value settings of operators, and the owner of this package writes that file.

Modules, in reading order:

    route_table.py   brokers, their addresses and topics
    name_server.py   the requests, and the key-value settings of operators
    registration.py  the other side: what a broker sends to a name server, ours or RocketMQ's
"""
