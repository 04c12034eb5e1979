"""EscrowMQ: a message is held until your database commits, then delivered."""
