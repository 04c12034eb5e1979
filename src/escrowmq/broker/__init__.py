"""The broker: requests in, responses out. It has no socket, starts no task and reads no clock.

    server --> Broker.handle() --> Handler: permission, flow control --> processor
                                                                            |
                       +------------------------+---------------------------+
                       v                        v                           v
                 records to append        a read of the store        tables of topics,
                       |                        |                    groups, offsets
                       v                        |                           |
    server --> Broker.end_turn() --> one append |                           |
                       |                        |                           |
                       +--> Channel.respond() <-+---------------------------+

1. Dispatch.  The server calls `handle()` for each request. The handler of its request code says
              which permission it needs and which function handles it.  (broker.py, dispatch.py)
2. Handle.    A processor validates the request. It responds at once, or adds records to the
              turn.                                                  (processors/, transactions/)
   Plain.     With the native module, plain sends, half messages and ends skip these steps: they
              are read and stored from the bytes of their connections.       (native_requests.py)
3. Append.    At the end of the turn of the event loop, all records are appended in one write.
              Responses leave when the records are as durable as their requests ask for. (turn.py)
4. Tick.      By time: held pulls expire, delayed messages become due, half messages are checked.
                                                 (broker.py, delayed_messages.py, transactions/)
5. Save.      Topics, groups, offsets and cursors are written to their files.
                                                                        (broker.py, metadata.py)

What always holds:
  - a request gets at most one response, and a one-way request gets none;
  - no response says SUCCESS before the records are stored, and flushed with SYNC_FLUSH;
  - an error, also a bug, becomes the response of one request and does not affect others;
  - a request without a permission of its own is for administrators.

Read in this order:

    dispatch.py           Channel, Handler, permissions, response codes of errors
    broker.py             creates the parts; handle, end_turn, tick, save
    turn.py               one append per turn of the event loop
    native_requests.py    the native path for plain requests, if the native module is installed
    processors/           one module for each family of requests
    transactions/         half messages: park, end, check, decide in groups
    metadata.py           topics and subscription groups that exist
    closed_names.py       topics and groups that belong to the broker alone
    flow_control.py       limits of connections, topics and the disk
    delayed_messages.py   delay levels and timers
    delivery_progress.py  which of them are delivered, after a crash too
    statistics.py         counters, and rates for RocketMQ's tools
    metrics.py            the same for Prometheus
"""
