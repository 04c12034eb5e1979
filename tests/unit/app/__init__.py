"""Unit tests of escrowmq.app."""
