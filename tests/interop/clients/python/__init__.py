"""The driver of the clients from PyPI; each has an interpreter of its own to run it."""
