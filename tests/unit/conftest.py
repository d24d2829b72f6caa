"""Hypothesis, for tests that draw their examples."""

import hypothesis

# Examples have no deadline: how long one takes depends on how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
