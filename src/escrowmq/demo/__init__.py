"""Bob pays Smith: two banks, two databases, thousands of transfers, and everything that can fail.

`python -m escrowmq.demo`, or `make demo`. `conductor.py` tells the story in order.
"""
