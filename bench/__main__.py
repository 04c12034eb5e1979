"""Run the figures: `python -m bench [--quick] [write] [read] [open]`."""

from __future__ import annotations

import sys

from bench import store_open, store_read, store_write
from bench.measure import keep, machine

PARTS = {"write": store_write.rows, "read": store_read.rows, "open": store_open.rows}
NOTES = [
    "Variants take turns; a figure is the median of its rounds. Compare ratios: absolute rates "
    "change with whatever else the machine does.",
    "Raw pwrite writes the same number of bytes to a fresh sparse file and does nothing else.",
]


def main() -> int:
    quick = "--quick" in sys.argv
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")] or list(PARTS)
    unknown = set(wanted) - set(PARTS)
    if unknown:
        print(f"no such figures: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    rounds = 1 if quick else 5
    for name in wanted:
        conditions = f"{machine()}, {rounds} rounds"
        rows = PARTS[name](quick=quick, rounds=rounds)
        result = f"store-{name}" + ("-quick" if quick else "")
        keep(result, f"The store: {name}", rows, NOTES, conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
