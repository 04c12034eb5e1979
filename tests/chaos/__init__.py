"""Inject faults into real processes and account for every message.

    python -m tests.chaos --minutes 1 --seed 7
    python -m tests.chaos --kills 200 --flush both

Read in this order:
  1. ledger.py   what the broker promised for each message, and the checks at the end
  2. actors.py   clients that send, decide and consume during the whole run
  3. faults.py   the faults, chosen by a seed
  4. relay.py    the TCP relay between clients and broker, which resets connections
  5. run.py      one run from start to report

A seed determines the faults and the pauses between them, but not the timing of the processes.
"""
