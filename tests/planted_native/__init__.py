"""Mistakes planted in the native path: the differential and contract tests must find all of them.

`python -m tests.planted_native` (`make planted`) plants one after the other in a copy, builds it
and runs the tests. It needs cargo and some minutes, so it is not part of CI;
tests/test_planted_native.py checks there that every mistake can still be planted. For mistakes in
Python, which are made up by rules instead of listed, see tests/mutants.
"""
