"""A module for each command of `escrowmq`, with a click command of the same name.

A module reads from top to bottom: the group, then for each sub-command its options, the function
that click calls, and below it the functions that compute and print its result. To add a command,
write `commands/NAME.py` and add the name to `COMMAND_NAMES` in `main.py`.

    serve.py           run a broker and a name server
    worker.py          run the handlers of an App
    config.py          settings, their values and origins
    topic.py           list, show, create, update, delete topics
    group.py           list, show, lag, reset, delete consumer groups
    message.py         send, tail, find, show messages
    dead.py            list, show, resend, export, purge dead letters: `message dead`
    transaction.py     list, show, explain, commit, rollback, resume transactions
    broker.py          list, show, top; settings of running brokers
    store.py           check, dump, backup, restore a store directory
    doctor.py          find what is wrong
    doctor_checks.py   the checks of `doctor`
    pipeline.py        ledger, archive, replay, reconcile on Spark
"""
