"""Clients that others wrote, each in an environment of its own that can be thrown away."""
