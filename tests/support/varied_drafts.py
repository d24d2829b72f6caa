"""Lossless rounds of changing numbers of drafts."""

import itertools

import pytest

from sparrow_sglang.plugin.lossless.pace import Pace


def vary_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of no, one and up to four drafts in turn, in engines that are forked from now on."""
    counts = itertools.cycle((0, 1, 4, 0, 0, 3))
    monkeypatch.setattr(Pace, "next_round", lambda *_: next(counts))
