"""Figures, as ratios measured in one run. `python -m bench` runs all of them."""
