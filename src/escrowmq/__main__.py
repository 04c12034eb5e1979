"""Run the command line: `python -m escrowmq` is the same as `escrowmq`."""

from __future__ import annotations

from escrowmq.cli.main import main

if __name__ == "__main__":
    main()
