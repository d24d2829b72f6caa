"""Processes that a benchmark starts."""

import os
import time

from sparrow_sglang.benchmarks.common import in_fresh_process


def test_a_function_in_a_fresh_process_fails_alone() -> None:
    assert in_fresh_process(time.sleep, 0)
    assert not in_fresh_process(os.path.join, 1)
    assert not in_fresh_process(os.abort)
