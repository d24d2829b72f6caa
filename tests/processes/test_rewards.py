"""Groups are scored in order, and no reward function stops the pool."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from reward_groups import group, obey
from waiting import wait_until

from sparrow_sglang.rl.tasks.rewards import RewardPool, RewardsFailed, part_metrics
from sparrow_sglang.rl.types import Prompt


def told(prompt: Prompt, text: str, finish_reason: str) -> float:
    os.kill(os.getpid(), signal.SIGINT)  # As Ctrl-C in a terminal does.
    return float(finish_reason == "length")


class RefusesToLoad:
    """Pickles, but cannot be loaded elsewhere."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (7,)

    def __call__(self, prompt: Prompt, text: str) -> float:
        return 0.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(obey, workers=2, timeout_s=3.0) as pool:
        yield pool


def test_groups_keep_their_places_whatever_ends_first(pool: RewardPool) -> None:
    groups = [group("a", 0.0, ["slow 1", "2", "3"]), group("b", 10.0, ["4", "slow 5", "6", "7"])]
    with pool.scoring() as scoring:
        for position in (1, 0):
            scoring.add(position, groups[position])
        scores = scoring.scores()
    assert scores.rewards == ((1, 2, 3), (14, 15, 16, 17))
    assert not any(scores.metrics().values())


def test_failed_rewards_are_missing_or_the_lowest_and_counted(pool: RewardPool) -> None:
    texts = ["1", "crash", "hang", "raise", "2", "nan", "exit", "hang", *"345678"]
    before = time.monotonic()
    scores = pool.score([group("a", 0.0, texts)])
    assert scores.rewards[0] == (1, 0, 0, None, 2, None, 0, 0, 3, 4, 5, 6, 7, 8)
    assert (scores.errors, scores.crashes, scores.timeouts) == (2, 2, 2)
    # The programs that hang do so for ten minutes.
    assert time.monotonic() - before < 120
    assert pool.score([group("b", 0.0, ["5"])]).rewards[0] == (5,)


def grades_from_minus_one(prompt: Prompt, text: str) -> float:
    if text == "hang":
        time.sleep(600)
    return {"right": 1.0, "close": 0.5}.get(text, -1.0)


def test_hanging_never_pays_more_than_a_wrong_answer_before_it_or_after_a_resume() -> None:
    with RewardPool(obey, workers=2, timeout_s=2.0) as pool:
        assert pool.score([group("a", 0.0, ["1", "-1", "hang"])]).rewards[0] == (1, -1, -1)
        assert pool.score([group("b", 0.0, ["1", "1", "crash"])]).rewards[0] == (1, 1, -1)
    lowest: dict[str, float] = {}
    with RewardPool(grades_from_minus_one, workers=2, timeout_s=2.0, lowest=lowest) as pool:
        groups = [group("a", 0.0, ["hang", "right", "close"])]
        assert pool.score(groups).rewards[0] == (-1, 1, 0.5)
    assert lowest == {"test": -1.0}
    # A task whose function refuses empty responses.
    with RewardPool(obey, workers=2, timeout_s=2.0, lowest=lowest) as pool:
        assert pool.score([group("a", 0.0, ["hang", "1", "2"])]).rewards[0] == (-1, 1, 2)


def test_what_crashes_once_is_scored_again(tmp_path: Path) -> None:
    with RewardPool(crashes_once, workers=1) as pool:
        scores = pool.score([group("a", 0.0, [str(tmp_path / "mark")])])
    assert (scores.rewards, scores.crashes) == (((1.0,),), 0)


def crashes_once(prompt: Prompt, text: str) -> float:
    if not Path(text).exists():
        Path(text).touch()
        os._exit(1)
    return 1.0


def test_more_than_half_of_the_rewards_missing_is_an_error(pool: RewardPool) -> None:
    with pytest.raises(RewardsFailed, match="3 of 5 rewards failed, the last: prompt .*: errors"):
        pool.score([group("a", 0.0, ["raise", "nan"]), group("b", 0.0, ["raise", "1", "2"])])


def starts_a_process(prompt: Prompt, text: str) -> float:
    with subprocess.Popen(["sleep", "600"]) as process:
        Path(text).write_text(str(process.pid))
    return 0.0


def test_what_a_reward_has_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with RewardPool(starts_a_process, workers=1, timeout_s=3.0) as pool:
        with pytest.raises(RewardsFailed, match="timeouts"):
            pool.score([group("a", 0.0, [str(file)])])
        started = int(file.read_text())
        assert wait_until(lambda: not psutil.pid_exists(started))


def test_scoring_ends_early_where_it_is_given_up_or_its_time_is_over() -> None:
    with RewardPool(obey, workers=2, timeout_s=600.0) as pool:
        before = time.monotonic()
        with pytest.raises(KeyError), pool.scoring() as scoring:
            scoring.add(0, group("a", 0.0, ["hang"]))
            raise KeyError
        assert pool.score([group("b", 0.0, ["1", "2", "3"])]).rewards[0] == (1, 2, 3)
        # One deadline holds for all rewards of a step.
        pool.total_timeout_s = 5.0
        scores = pool.score([group("c", 0.0, ["hang", *map(str, range(8)), *["hang"] * 6])])
        assert scores.rewards[0] == (None, *range(8), *[None] * 6) and scores.late == 7
        pool.total_timeout_s = 300.0
        assert pool.score([group("d", 0.0, ["5"])]).rewards[0] == (5,)
        assert time.monotonic() - before < 120


def test_a_reward_that_asks_for_it_is_told_how_the_response_ended() -> None:
    groups = [group("a", 0.0, ["1"]), group("b", 0.0, ["2", "3"], "length")]
    with RewardPool(told, workers=1) as pool:
        assert pool.score(groups).rewards == ((0,), (1, 1))


def test_groups_are_scored_while_others_are_added(pool: RewardPool) -> None:
    with pool.scoring() as scoring:
        scoring.add(2, group("a", 0.0, ["slow 1", "2"]))
        # The rewards are there before anybody has called `scores`.
        assert wait_until(lambda: all(job.done() for job in scoring.jobs), 120)
        scoring.add(1, group("b", 10.0, ["crash", "4", "raise"]))
        scoring.add(0, group("c", 0.0, ["5"]))
        scores = scoring.scores()
        assert scores.rewards == ((5,), (0, 14, None), (1, 2))
        assert (scores.errors, scores.crashes, scores.timeouts) == (1, 1, 0)
    assert pool.score([group("e", 0.0, ["7"])]).rewards[0] == (7,)


def test_a_reward_that_cannot_be_loaded_is_an_error() -> None:
    with RewardPool(RefusesToLoad(), workers=1) as pool:
        with pytest.raises(RewardsFailed, match="cannot be loaded: .* status 7"):
            pool.score([group("a", 0.0, ["1"])])
        # In a thread, too.
        with pool.scoring() as scoring:
            scoring.add(0, group("a", 0.0, ["1"]))
            with pytest.raises(RewardsFailed, match="cannot be loaded: .* status 7"):
                scoring.scores()


def in_parts(prompt: Prompt, text: str) -> dict[str, float]:
    more = {"long": 1.0} if text == "6" else {}
    return {"score": float(text), "length": float(len(text))} | more


def together(prompts: list[Prompt], texts: list[str], finish_reasons: list[str]) -> list[object]:
    if "short" in texts:
        return [1.0]
    if "unknown" in texts:
        return [None, {"score": None, "whole": 1.0}, 4.0]
    same = {prompt.id for prompt in prompts} == {prompts[0].id}
    whole = [reason == "stop" for reason in finish_reasons]
    return [{"score": len(texts) + same, "whole": w} for w in whole]


def test_each_task_has_its_reward_which_may_take_a_group_at_once_and_give_sub_scores() -> None:
    groups = [group("a", 0.0, ["1", "30", "6"]), group("b", 0.0, ["x", "y"]), group("c", 0, ["2"])]
    groups += [group("d", 0.0, ["short", "z"])]
    tasks = {"a": "parts", "b": "together", "c": "parts", "d": "together"}
    groups = [replace(g, prompt=replace(g.prompt, task=tasks[g.prompt.id])) for g in groups]
    with RewardPool({"parts": in_parts, "together": together}, workers=2) as pool:
        scores = pool.score(groups)
    assert scores.rewards == ((1, 30, 6), (3, 3), (2,), (None, None))
    assert scores.parts[0] == ({"length": 1.0}, {"length": 2.0}, {"length": 1.0, "long": 1.0})
    assert scores.parts[1] == ({"whole": 1.0}, {"whole": 1.0})
    unknown = replace(group("e", 0.0, ["unknown", "b", "c"]), prompt=groups[1].prompt)
    with RewardPool({"together": together}, workers=1) as pool:
        partly = pool.score([groups[1], unknown])
    assert partly.rewards == ((3, 3), (None, None, 4)) and partly.errors == 2
    assert partly.parts[1] == ({}, {"whole": 1.0}, {})
    # One reward for two responses is an error of both.
    assert (scores.parts[3], scores.errors) == (({}, {}), 2)
    metrics = part_metrics(scores.parts)
    assert metrics["sparrow/score/length"] == (1 + 2 + 1 + 1) / 4
    assert (metrics["sparrow/score/long"], metrics["sparrow/score/whole"]) == (1, 1)
