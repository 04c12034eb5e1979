"""The escrow: halves are parked here until somebody decides, and nobody decides twice.

    verdict     what can be said of a transaction, and what can have become of it
    shapes      the records: half, final, op, stranded
    journal     what a producer is asked, and a line for each step of it
    settled     two bits for every half that was ever parked
    halves      the open ones: by place, by key, by group
    due         when each is to be asked about
    asking      who is asked, and how many at once
    escrow      the protocol itself: park, end, check
    recover     the same table again from the log, after a stop or a crash

No socket, no file, no clock in here: time comes in as a value, records go out to be appended.
"""
