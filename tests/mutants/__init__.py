"""Mutation testing: plant small mistakes in the source and report those that no test notices.

    src ──operators──► possible mistakes ──selection──► a sample, spread over the packages
                                                          │
    tests ──coverage_map──► which test runs which line ───┤
                                                          ▼
                                 workspace: a copy of the tree, one mistake at a time,
                                            the covering tests, nearest first
                                                          │
                                                          ▼
                                 report: noticed, survived, not covered

Modules in reading order: `operators` (what a mistake is), `selection` (which are planted),
`coverage_map` (which tests run), `workspace` and `pytest_runner` (how they run), `report`.
`make mutants COUNT=… SEED=… PACKAGES="…"` starts it; it is not part of CI.

Limits: lines that run only in a child process of a test count as not covered. So do lines that a
test skips because an earlier test has filled a cache.
"""
