"""The interface of rollout engines: prompts in, groups out.

How an engine gets weights depends on where the trainer is: `LocalEngine.update_weights`,
`RayEngines.load`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from sparrow_sglang.rl.engines.responses import MoreGroups, OnFinished, ShouldStop
from sparrow_sglang.rl.rollout import Sampling
from sparrow_sglang.rl.types import Group, Prompt


class RolloutEngine(Protocol):
    """Samples responses from the weights that it was last given."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        on_finished: OnFinished | None = None,
    ) -> list[Group]:
        """One group of `n` samples per prompt, in the order of the prompts; all or an error."""
        begun = [Group.begun(prompt, n) for prompt in prompts]
        groups = dict(self.stream(begun, sampling, on_finished))
        return [groups[position] for position in range(len(prompts))]

    def stream(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        on_finished: OnFinished | None = None,
        more_groups: MoreGroups | None = None,
        should_stop: ShouldStop | None = None,
    ) -> Iterator[tuple[int, Group]]:
        """Yields each group once, as soon as it is finished, with its position in `groups`.

        A response that was stopped earlier is continued after a dense prefill of its tokens.
        `more_groups` is called regularly for additional groups, which take the next positions; the
        stream ends when no group is under way and it returns none. Once `should_stop` returns True,
        no group is started any more, and unfinished groups are yielded as they are.
        """
        ...

    def release(self) -> None:
        """Give the device's memory to the trainer, if it is shared; weights may be lost."""
        ...

    def resume(self) -> None:
        """Take the memory back; after a `release`, all weights must be loaded."""
        ...

    def close(self) -> None:
        """End the engine's processes."""
        ...
