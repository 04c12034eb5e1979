"""The database bindings on real databases, with a real broker."""
