"""Hypothesis, for tests that draw their examples."""

import hypothesis

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
