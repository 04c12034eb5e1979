"""Producers: send messages, alone or in transactions."""
