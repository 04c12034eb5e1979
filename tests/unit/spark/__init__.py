"""Unit tests of the Spark half: plain classes, no JVM."""
