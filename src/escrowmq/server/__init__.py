"""`escrowmq serve`: broker and name server on sockets, with timers, threads and signals.

The packages below take values and return values. This package decides when things happen: it owns
the event loop, the ports, the clocks and the files of certificates.

    client ─→ ServerConnection ─→ Broker.handle() ─→ … end of the turn: one append ─→ responses
                                                            │ SYNC_FLUSH
    SIGHUP, mqadmin ─→ LiveConfig ─→ all parts         GroupCommit ─→ one flush ─→ responses
    timers ─→ StoreMaintenance, Broker.tick()          Registrar ─→ name servers

What always holds:
  - everything of a broker runs in one thread, its event loop; only flushes, checkpoints and the
    deletion of files run beside it
  - a response leaves only after its records are as durable as the flush mode promises
  - memory is bounded: what is kept for a client is counted in bytes, or limited in number, and the
    greedy are limited first
  - if a background task fails, the process stops cleanly; it never continues without that task

Modules in reading order:
  serve.py            start, wire the parts together, stop
  remoting_server.py  a port, its connections, their turns
  server_connection.py  one connection: its requests in slices, its responses in portions
  connection_limits.py  connections that use too much memory, or are idle
  tasks.py            group commit, flushes, checkpoints, expiry
  namesrv.py          the name server on its port, registration of brokers
  security.py         access control, detection of TLS, reloading of their files
  tls_connection.py   TLS of one connection
  live_config.py      settings that change while the server runs, logging
  metrics.py          metrics of ports, disk and process, health
  http_server.py      /metrics and /health
  supervisor.py       `--brokers N`: several brokers as processes of one cluster
"""
