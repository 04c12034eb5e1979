"""Tests of the code that the database bindings share."""
