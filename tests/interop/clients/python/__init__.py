"""The driver of the clients from PyPI, which runs in the environment of each client."""
