"""What the database bindings share."""
