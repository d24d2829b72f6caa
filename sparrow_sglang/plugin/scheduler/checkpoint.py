"""Names and shapes of the weights with which a server was started, which later ones must have."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparrow_sglang.errors import InputError
from sparrow_sglang.hf_config import model_value, text_config
from sparrow_sglang.json_values import cut
from sparrow_sglang.models import stored_shapes
from sparrow_sglang.plugin.scheduler.adapter_checks import empty_model

_EXPERTS = ".experts."
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# Some checkpoints have them, and no model loads them: rotary angles, and the layers that predict
# more than the next token.
_IGNORED = ("rotary_emb.", "mtp.")
# Parts of names that differ between a multimodal model's checkpoint and its modules.
_WRAPPERS = ("model", "language_model")


@dataclass(frozen=True)
class Checkpoint:
    """What a model can load.

    Attributes:
        stored: shapes by name, from the files that a server was started with; empty if unreadable.
        hf_config: of the model, which tells names and shapes where the files do not.
    """

    stored: Mapping[str, Sequence[int]]
    hf_config: Any

    @classmethod
    def of_model(cls, model_config: Any) -> "Checkpoint":
        """That of SGLang's `ModelConfig`."""
        stored: dict[str, Sequence[int]] = {}
        folder = local_folder(model_config.model_path, model_config.revision)
        # With load_format="dummy" there need not be any.
        with suppress(InputError):
            found = {} if folder is None else stored_shapes(folder)
            stored = {name: shape for name, (_, shape) in found.items()}
        return cls(stored, model_config.hf_config)

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shape of each tensor that the model takes; empty if unknown."""
        shapes = self.stored
        if not shapes:
            # Configs of SGLang's own lack what transformers reads.
            with suppress(Exception):
                weights = empty_model(self.hf_config).state_dict()
                shapes = {name: tensor.shape for name, tensor in weights.items()}
        known = {self._key(name): list(shape) for name, shape in shapes.items()}
        if self._is_tied and (embeddings := self._key(_EMBEDDINGS)) in known:
            known[_HEAD] = known[embeddings]
        return known

    @cached_property
    def whole(self) -> set[str]:
        """What an update of all weights brings."""
        skipped = {_HEAD} if self._is_tied else set()
        return {key for key in self.shapes if not _is_ignored(key)} - skipped

    @property
    def _is_tied(self) -> bool:
        return bool(model_value(self.hf_config, "tie_word_embeddings"))

    def _key(self, name: str) -> str:
        if text_config(self.hf_config) is self.hf_config:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

    def problem(self, name: str, shape: Sequence[int]) -> str | None:
        """Why the model cannot load this tensor; None if it can, or if that is unknown."""
        key, shape = self._key(name), list(shape)
        if not self.shapes or _is_ignored(name):
            return None
        expected = self.shapes.get(key)
        if expected is None:
            if self._experts(key):
                return None
            return f"{cut(name)} {shape}: the model has no tensor of that name"
        if shape == expected or math.prod(shape) == math.prod(expected) == 1:
            return None
        return f"{cut(name)} is {shape}: expected {expected}"

    def _experts(self, key: str) -> set[str]:
        """The experts of a layer, which are stored one by one or stacked; SGLang takes both."""
        layer, experts, _ = key.partition(_EXPERTS)
        return self._experts_by_layer[layer] if experts else set()

    @cached_property
    def _experts_by_layer(self) -> Mapping[str, set[str]]:
        found: defaultdict[str, set[str]] = defaultdict(set)
        for key in self.whole:
            if _EXPERTS in key:
                found[key.partition(_EXPERTS)[0]].add(key)
        return found

    def note(self, names: Iterable[str]) -> str:
        """What an update with these names leaves as it was; empty if nothing, or if unknown."""
        keys = {self._key(name) for name in names}
        updated = self.whole & keys
        updated.update(*(self._experts(key) for key in keys - self.shapes.keys()))
        if not (absent := sorted(self.whole - updated)):
            return ""
        return f"{len(updated)} of {len(self.whole)} tensors were updated, not {absent[0]}"


def _is_ignored(name: str) -> bool:
    return any(part in name for part in _IGNORED)


def local_folder(path: str, revision: str | None = None) -> Path | None:
    """A model's folder, also of a hub id in the local cache; None if there is none, as of the URLs
    and files that only SGLang can read."""
    if (folder := Path(path)).is_dir():
        return folder
    from huggingface_hub import snapshot_download

    # What is not in the cache, and what is no hub id.
    with suppress(OSError, ValueError):
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    return None
