"""The shared nouns: a message as bytes, its properties, its ids, its offsets.

Both the wire and the store speak of these, and neither knows the other. Nothing here opens a
file, reads a clock or starts a task. Read `record.py` first.
"""
