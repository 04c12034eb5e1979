"""Chaos with real processes: everything is broken on purpose, and every message accounted for.

    python -m tests.chaos --minutes 1 --seed 7

Read in this order:
  1. ledger.py   what was promised, and what must be true of it in the end
  2. actors.py   who sends, decides and consumes throughout
  3. faults.py   what is done to them, by a seed
  4. relay.py    the way between clients and broker, that can be cut
  5. run.py      one run from start to verdict

A seed gives the same faults with the same pauses; what the processes do in between is theirs.
"""
