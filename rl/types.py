"""The data that stages of a training step exchange: prompts, their samples, and groups of samples.

All are frozen. Token ids are plain tuples, so that they hash, compare and travel between
processes; log-probs are arrays, because there are many of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prompt:
    """One task instance, rendered and tokenised.

    `payload` is what the task's reward needs besides the response (an answer, tests, ...): plain
    data that can be pickled. `id` is unique within the task.
    """

    id: str
    task: str
    input_ids: tuple[int, ...]
    payload: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ValueError` on a prompt without tokens, which no engine can continue."""
        if not self.input_ids:
            raise ValueError(f"prompt {self.id!r} of task {self.task!r} has no tokens")


ABORTED = "abort"
"""The `finish_reason` of a response that is not finished."""


@dataclass(frozen=True)
class Segment:
    """Response tokens [start, end) that one request to the engine sampled.

    All that precedes `start`, the prompt included, was prefilled densely for this request, except
    for `cached` tokens out of the prefix cache. The segment's tokens were decoded under `schedule`
    from the weights `weight_version`. If the engine has `retracted` the request, it later prefilled
    some of these tokens as well, and does not say how many.
    """

    start: int
    end: int
    weight_version: str
    schedule: str
    cached: int = 0
    retracted: bool = False


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The tokens that top-k and top-p left to draw from, for each of T sampled tokens.

    `lengths` [T] int32 says how many; `ids` [sum of lengths] int32 has those of one sampled token
    after another.
    """

    lengths: NDArray[np.int32]
    ids: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> "SamplingMask":
        """From one list of token ids per sampled token."""
        lengths = np.array([len(row) for row in rows], np.int32)
        return cls(lengths, np.fromiter(chain.from_iterable(rows), np.int32))

    @classmethod
    def joined(cls, masks: Iterable["SamplingMask | None"]) -> "SamplingMask | None":
        """The masks one after another; None if there are none, as nothing was truncated."""
        known = [mask for mask in masks if mask is not None]
        if not known:
            return None
        lengths, ids = zip(*((mask.lengths, mask.ids) for mask in known), strict=True)
        return cls(np.concatenate(lengths), np.concatenate(ids))

    def at(self, tokens: NDArray[np.int64]) -> "SamplingMask":
        """The mask of the sampled tokens with these indices, in their order."""
        lengths = self.lengths[tokens]
        shift = np.repeat(self.lengths.cumsum()[tokens] - lengths.cumsum(), lengths)
        return SamplingMask(lengths, self.ids[shift + np.arange(len(shift))])


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sampled response, as the sparse actor produced and recorded it.

    `logprobs` [T] are float32 natural log-probs of the T sampled tokens, of the distribution that
    they were sampled from. `sample` counts the samples of one prompt from 0. `weight_version` and
    `schedule` name the weights and the active KV budget schedule while its last tokens were
    generated. `finish_reason` is SGLang's: "stop", "length", or "abort" for a response that is to
    be continued. `segments` cover the sampled tokens, in order; tokens between them are an
    environment's, and not in the loss. By default all tokens are one segment. `text` is that of the
    last turn, `earlier_turns` are the texts of the turns before it. `sampling_mask` is there if
    sampling was truncated.
    """

    prompt_id: str
    sample: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: NDArray[np.float32]
    finish_reason: str
    weight_version: str
    schedule: str
    text: str
    segments: tuple[Segment, ...] = ()
    earlier_turns: tuple[str, ...] = ()
    sampling_mask: SamplingMask | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` unless there is one finite log-prob per sampled token."""
        if not self.segments and self.response_ids:
            whole = Segment(0, len(self.response_ids), self.weight_version, self.schedule)
            object.__setattr__(self, "segments", (whole,))
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        sampled = sum(segment.end - segment.start for segment in self.segments)
        if logprobs.shape != (sampled,) or not np.isfinite(logprobs).all():
            raise ValueError(
                f"rollout {self.prompt_id!r}/{self.sample}: logprobs of shape {logprobs.shape} for"
                f" {sampled} sampled tokens: expected one finite log-prob for each"
            )
        object.__setattr__(self, "logprobs", logprobs)

    @property
    def truncated(self) -> bool:
        """Whether the length limit ended the response."""
        return self.finish_reason == "length"

    @property
    def finished(self) -> bool:
        return self.finish_reason != ABORTED

    @property
    def retracted(self) -> bool:
        """Whether a request was retracted, so that it is unknown which tokens were prefilled."""
        return any(segment.retracted for segment in self.segments)

    @property
    def turns(self) -> tuple[str, ...]:
        """Texts of the model's turns."""
        return (*self.earlier_turns, self.text)

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Token ids by turns: given and sampled ones alternately, beginning with the prompt.

        The last part is empty if nothing has been sampled since the last given tokens.
        """
        parts: list[tuple[int, ...]] = [self.prompt_ids, ()]
        end = 0
        for segment in self.segments:
            if segment.start > end:
                parts += [self.response_ids[end : segment.start], ()]
            end = segment.end
            parts[-1] += self.response_ids[segment.start : end]
        if end < len(self.response_ids):
            parts += [self.response_ids[end:], ()]
        return tuple(parts)

    def cut(self, limit: int) -> "Rollout":
        """The same response, or, if it is unfinished and has `limit` tokens, ended as truncated.

        An environment's answer at its end is removed then, as one that exceeds the limit is never
        added.
        """
        if self.finished or len(self.response_ids) < limit:
            return self
        if self.parts[-1]:
            return replace(self, finish_reason="length")
        *earlier, text = self.earlier_turns
        return replace(
            self,
            response_ids=self.response_ids[: self.segments[-1].end],
            finish_reason="length",
            text=text,
            earlier_turns=tuple(earlier),
        )

    def split(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Token ids of each segment: all that precedes it, prompt included, and its own."""
        ids, first = (*self.prompt_ids, *self.response_ids), len(self.prompt_ids)
        return [
            (ids[: first + segment.start], ids[first + segment.start : first + segment.end])
            for segment in self.segments
        ]


@dataclass(frozen=True, eq=False)
class Group:
    """All samples of one prompt, in the order of `Rollout.sample`."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]

    @classmethod
    def begun(cls, prompt: Prompt, samples: int) -> Self:
        """A group of `samples` responses that have no tokens yet."""
        none = np.empty(0, np.float32)
        rollouts = (
            Rollout(prompt.id, sample, prompt.input_ids, (), none, ABORTED, "", "", "")
            for sample in range(samples)
        )
        return cls(prompt, tuple(rollouts))

    def cut(self, limit: int) -> "Group":
        """The same group, each response as `Rollout.cut` gives it."""
        return replace(self, rollouts=tuple(rollout.cut(limit) for rollout in self.rollouts))

    @property
    def finished(self) -> bool:
        """Whether all of its responses are finished."""
        return all(rollout.finished for rollout in self.rollouts)

    @property
    def tokens(self) -> int:
        """Response tokens sampled so far."""
        return sum(len(rollout.logprobs) for rollout in self.rollouts)
