"""The `escrowmq` command."""
