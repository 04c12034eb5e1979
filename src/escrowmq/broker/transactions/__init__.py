"""The transaction requests of a broker. The protocol is in `escrow/`; here it meets the turn.

    SEND with TRAN_MSG            park.py ─────────────┐
    END_TRANSACTION               end.py ──────────────┤
    END_TRANSACTIONS, writers     group_decisions.py ──┼─▶ coordinator ─▶ records ─▶ Turn.add
    SETTLE, RESUME (operators)    admin.py ────────────┤                      │
    tick: due halves              check.py ────────────┘    stored: apply, not stored: cancel

A request is answered when its records are as durable as the broker's flush mode demands. A
response that only reports a decision waits for that too, because clients act on it.

Read in this order:
    park.py              store half messages
    end.py               decide one half, move halves out of segments that expire
    group_decisions.py   decide many halves, in pieces if they are large; writers
    check.py             send checks, strand halves
    persistence.py       recovery at the start, snapshots, RocketMQ's cursors
    history.py           what the log says about one transaction (`escrowmq transaction show`)
    admin.py             requests of operators: list, show, settle, resume
"""
