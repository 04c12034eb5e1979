"""Hypothesis profiles: "ci" by default, "long" for a night of fuzzing (HYPOTHESIS_PROFILE=long)."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
