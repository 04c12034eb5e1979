"""Consumers: pull messages, run handlers, commit offsets."""
