"""The commands of `escrowmq`, one module per command group."""
