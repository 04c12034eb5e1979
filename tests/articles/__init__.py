"""The behaviours that articles about RocketMQ's transactional messages describe, as a suite.

The docstring of each module is a table of numbered behaviours. The line below a behaviour names
the test that shows it: in this module, or in another file of `tests`. test_table.py checks that
the numbers are complete and that every named test exists.

Tests with the fixture `broker` send raw requests or use our client. `make interop` runs them also
against Apache RocketMQ 4.9.7, because there RocketMQ is the reference.
"""
