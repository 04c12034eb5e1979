"""The demo: Bob pays Smith thousands of times while processes are killed.

Two banks with a database each and one broker. `make demo` runs it (`python -m examples.bank`).

    payer.py ── debit + message ──> broker ── message ──> payee.py
    (Bob's bank)                      │                   (Smith's bank)
                                      └── records ──> audit.py: Spark compares all three

Read in this order:
  1. banks.py      the tables of both banks, and how their books are compared
  2. payer.py      Bob's side: debit the account and send the message in one transaction
  3. payee.py      Smith's side: credit each transfer once
  4. branch.py     transactions that are stranded, explained, resumed and decided by hand
  5. processes.py  start, stop and kill the processes
  6. scenario.py   the run: start everything, kill processes, wait until every transfer is decided
  7. audit.py      Spark: the ledger against both databases
  8. __main__.py   the command line and what it prints
"""
