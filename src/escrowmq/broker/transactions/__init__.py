"""The transaction requests, checks and recovery of a broker."""
