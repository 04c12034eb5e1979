"""Are we the same on the wire and on disk? Judged by Apache RocketMQ itself, live or captured."""
