"""Benchmarks: ratios measured in one run. `python -m bench` runs those of the store."""
