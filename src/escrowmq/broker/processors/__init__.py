"""One processor per family of requests."""
