"""Unmodified clients of other projects, each in its own environment, and their drivers."""
