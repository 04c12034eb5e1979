"""One module for each family of requests. Each processor returns its `handlers()`.

    send.py             SEND_MESSAGE and its variants: validate, make records
    pull.py             PULL_MESSAGE: read the log, or hold the pull
    send_back.py        failed messages to the retry topic; replies to the requester
    clients.py          heartbeats, members of groups, queue locks
    query.py            offsets of queues and groups; messages by key or id
    admin_metadata.py   topics, subscription groups; users and policies
    admin_groups.py     connections and progress of groups; reset offsets; relay to a consumer
    admin_broker.py     runtime information, settings, backup

To refuse a request, a processor raises RequestRefused with a response code, or any error that
RESPONSE_CODES of `broker/dispatch.py` lists. It never encodes: it hands values to the channel.
"""
