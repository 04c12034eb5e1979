"""One module for each family of requests. Each processor returns its `handlers()`.

    send.py             SEND_MESSAGE and its variants: validate, make records
    pull.py             PULL_MESSAGE: read the log, or hold the pull
    send_back.py        failed messages to the retry topic; replies to the requester
    clients.py          heartbeats, members of groups, queue locks
    query.py            offsets of queues and groups; messages by key or id
    admin_metadata.py   topics, subscription groups; users and policies
    admin_groups.py     connections and progress of groups; reset offsets; relay to a consumer
    admin_broker.py     runtime information, settings, backup

A processor raises an error to refuse a request: RequestRefused with a response code, or any error of
RESPONSE_CODES in `broker/dispatch.py`. It never encodes: it hands values to the channel.
"""
