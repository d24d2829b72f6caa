"""`sparrow serve`: SGLang's own launcher with our defaults; every SGLang flag passes through. Our
flags and the port are checked before SGLang is imported, which takes ten seconds."""

import argparse
import copy
import functools
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, NoReturn

from sparrow_sglang.errors import InputError
from sparrow_sglang.models import (
    EMBEDDED_MODEL_NAME,
    ModelError,
    model_folder,
    model_problem,
    path_problem,
)
from sparrow_sglang.plugin.arguments.server_args import FIELDS, plugins_problem
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import BACKEND, DRAFT_WEIGHTS, WEIGHTS_FIELD, uses_sparrow
from sparrow_sglang.processes import exit_on_sigterm
from sparrow_sglang.schedules.names import AUTO
from sparrow_sglang.sglang_compat.arguments import (
    config_file_merger,
    read_model_config,
    resolve,
    resolved,
)
from sparrow_sglang.sglang_compat.versions import import_problem, version_problems
from sparrow_sglang.validation import nearest_first

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

HELP = """\
usage: sparrow serve [--model-path MODEL] [--sparrow-schedule SCHEDULE] [SGLang flags ...]

Start an OpenAI-compatible SGLang server that decodes sparsely.

Prefill is dense. Each decoded token reads only a budget of the cached tokens, which grows with the
sequence as a schedule says.

examples:
  sparrow serve
      the small embedded model (SmolLM2-135M); works without a GPU, too
  sparrow serve --model-path Qwen/Qwen3-4B
      your model; the shipped schedule that was calibrated for it is chosen automatically
  sparrow serve --model-path Qwen/Qwen3-4B --speculative-algorithm SPARROW
      lossless decoding: sparse steps draft, one dense pass verifies; answers are those of dense
      decode, for any model with full attention, without calibration
  sparrow serve --model-path Qwen/Qwen3-4B --sparrow-schedule fixed-4096 --port 8000
      the same budget of 4096 tokens at every length, and a flag of SGLang (--port)

defaults of sparrow, which your own flags override:
  --attention-backend sparrow    sparse decode
  --model-path smollm2-135m      the small model, converted at the first start (half a minute)
  --page-size 16                 tokens per page
  --log-level warning            SGLang's own default, info, logs every batch
  --dtype float32                without a GPU, where bfloat16 takes about twice as long

flags of sparrow:
  --sparrow-schedule NAME        a shipped schedule (sparrow schedules lists them), a .json file or
                                 fixed-<tokens>
  --sparrow-dense-backend NAME   prefill by this backend of SGLang on a GPU (fa3, flashinfer,
                                 triton) instead of the one that SGLang would choose
  --sparrow-audit-rate SHARE     score this share of finished requests again, densely, to measure
                                 how far sparse decode deviates (0 to 1; 0.01 is a good start),
                                 for --enable-metrics
  --sparrow-draft-weights NAME   lossless decoding drafts with the model's own weights (model), FP8
                                 copies (fp8), or copies where these pay (auto, the default)
  --sparrow-disable-lookups      lossless decoding drafts by sparse steps only

All flags of SGLang work unchanged: sparrow serve --help-all lists them.
Does your model work? sparrow doctor --model-path MODEL
"""

_MODEL_FLAGS = ("--model-path", "--model")
_WEIGHTS_FLAG = f"--{WEIGHTS_FIELD.replace('_', '-')}"
_ALL_FLAGS = "sparrow serve --help-all lists the flags"


def main(argv: Sequence[str]) -> int:
    """Run a server until it is stopped. Raises `InputError` before it starts, if it cannot."""
    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
    elif "--help-all" in argv:
        _sglang_parser().print_help()
    else:
        _serve(argv)
    return 0


def _serve(argv: Sequence[str]) -> None:
    try:
        # Before the small model is converted, which takes half a minute.
        check_flags(argv)
        # A file may name another.
        if not (_names_file(argv) or _value(argv, "--port")):
            require_free_port(_value(argv, "--host") or "127.0.0.1", 30000)
        server_args = parse_server_args(with_defaults(argv))
        require_free_port(server_args.host, server_args.port)
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(str(error)) from error
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    ready = False

    def when_ready() -> None:
        nonlocal ready
        ready = True
        print(_ready_lines(server_args), file=sys.stderr, flush=True)

    exit_on_sigterm()
    try:
        if uses_sparrow(server_args) and not server_args.encoder_only:
            launch_server(server_args, launch_callback=when_ready)
        else:
            run_server(server_args)
    except KeyboardInterrupt:
        # SGLang 0.5.20 re-raises the KeyboardInterrupt after it has stopped the server in order.
        if not ready:
            raise
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _ready_lines(server_args: "ServerArgs") -> str:
    from sparrow_sglang.attention_backends.dense_side import dense_backend
    from sparrow_sglang.plugin.arguments.server_args import resolve_schedule

    view, model_config = resolved(server_args), read_model_config(server_args)
    schedule = resolve_schedule(server_args, model_config.hf_config)
    name = server_args.served_model_name or server_args.model_path
    on_gpu = view.device == "cuda"
    url = f"http://{server_args.host}:{server_args.port}"
    rows = {
        "model": server_args.model_path,
        "decode": mode_of(view).describe(view, schedule, model_config.hf_config),
        "prefill": dense_backend(server_args, model_config) if on_gpu else f"torch, {view.device}",
        "request": f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d"
        f""" '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hi"}}]}}'""",
    }
    lines = [f"{key:10}{value}" for key, value in rows.items()]
    return "\n".join([f"sparrow: ready on {url}", *lines])


def with_defaults(argv: Sequence[str], *, cpu_dtype: bool = True) -> list[str]:
    """`argv` with our defaults in front, where the user's flags override them, and the folder of an
    embedded model, which is converted if necessary, at the end. `cpu_dtype` is one of them where
    there is no GPU. Raises `ModelError`."""
    flags: list[str] = []
    for word in argv:
        # SGLang knows the two words only, and would ignore the file silently.
        flags += word.split("=", 1) if word.startswith("--config=") else [word]
    if flags and not flags[0].startswith("-"):
        flags.insert(0, _MODEL_FLAGS[0])
    model = _value(flags, *_MODEL_FLAGS) or (None if "--config" in flags else EMBEDDED_MODEL_NAME)
    if model is not None and (problem := path_problem(model)):
        raise ModelError(f"{_MODEL_FLAGS[0]} {model}: {problem}")
    from sparrow_sglang.plugin.registration import on_cpu_platform

    dtype = ["--dtype", "float32"] if cpu_dtype and on_cpu_platform() else []
    defaults = ["--attention-backend", BACKEND, *dtype, "--log-level", "warning"]
    folder = model and model_folder(model)
    if folder is None or folder == model:
        return defaults + flags
    # Clients request the model by its name, not by a path in the user's cache.
    return [*defaults, "--served-model-name", str(model), *flags, _MODEL_FLAGS[0], folder]


def check_flags(arguments: Sequence[str]) -> None:
    """Raise `InputError` without a usable SGLang, on wrong flags and values of ours, and on a port
    that cannot be taken."""
    for problem in (*version_problems(), plugins_problem()):
        if problem is not None:
            raise InputError(problem)
    own = [f"--{name.replace('_', '-')}" for name in FIELDS]
    for word in arguments:
        flag = word.partition("=")[0]
        # SGLang's parser accepts the beginning of a flag.
        if flag.startswith("--sparrow") and not any(name.startswith(flag) for name in own):
            raise _unrecognized(word, own)
    # A file may name the host.
    if (port := _value(arguments, "--port")) and not _names_file(arguments):
        require_free_port(_value(arguments, "--host") or "127.0.0.1", port)
    weights = _value(arguments, _WEIGHTS_FLAG) or AUTO
    if weights not in DRAFT_WEIGHTS:
        raise InputError(f"{_WEIGHTS_FLAG} {weights}: expected {', '.join(DRAFT_WEIGHTS)}")
    rate = _value(arguments, "--sparrow-audit-rate") or "0"
    with suppress(ValueError):
        if 0 <= float(rate) <= 1:
            return
    raise InputError(f"--sparrow-audit-rate {rate}: expected 0 to 1; 0.01 is a good start")


def _names_file(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--config" for word in arguments)


def require_free_port(host: str, port: str | int) -> None:
    """Raise `InputError` unless a server can listen there. SGLang tries to only once it has loaded
    the model, and then takes the answers of another server for its own."""
    try:
        if not 1 <= int(port) <= 65535:
            raise ValueError
        for family, *_, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM):
            socket.create_server(address[:2], family=family).close()
    except ValueError:
        raise InputError(f"--port {port}: expected 1 to 65535") from None
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise InputError(f"--port {port} of --host {host}: {reason}") from None


def parse_server_args(arguments: Sequence[str]) -> "ServerArgs":
    """SGLang's ServerArgs for a command line `with_defaults`, checked by SGLang and the plugin.
    Raises `ValueError` (`InputError`), `RuntimeError` or `OSError`."""
    full = list(arguments)
    if "--config" in full:
        # SGLang would put the file's flags in front of our defaults, which override them.
        start = full.index("--log-level") + 2
        merged = config_file_merger(_sglang_parser()).merge_config_with_args(full[start:])
        full = full[:start] + merged
    model_path = _sglang_parser().parse_args(full).model_path
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(full)
        resolve(server_args)
        # SGLang asserts these only when it starts. Checked on a copy, as it parses paths of LoRA.
        copy.deepcopy(server_args).check_server_args()
        return server_args
    except AssertionError as error:
        # Some assertions have no message; their source line says what they require.
        stated = traceback.extract_tb(error.__traceback__)[-1].line
        message = " ".join(str(error).split()) or f"SGLang refuses these flags: {stated}"
        raise InputError(message) from error
    except (ValueError, RuntimeError):
        raise
    except Exception as error:
        # On a config that they do not expect, transformers and SGLang raise anything.
        problem = model_problem(model_path, error)
        raise InputError(f"{_MODEL_FLAGS[0]} {model_path}: {problem}") from error


def _value(arguments: Sequence[str], *flags: str) -> str | None:
    """The last value given to one of `flags`, which overrides the others."""
    last = None
    for word, following in zip_longest(arguments, arguments[1:]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            last = value if equals else following
    return last


def _unrecognized(words: str, known: Iterable[str]) -> InputError:
    near = nearest_first(words.split()[0].partition("=")[0], known, cutoff=0.6)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return InputError(f"unrecognized arguments: {words}{hint}; {_ALL_FLAGS}")


class _OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line: the usage text of SGLang's hundreds of flags would bury them."""

    def error(self, message: str) -> NoReturn:
        if words := message.partition("unrecognized arguments: ")[2]:
            raise _unrecognized(words, self._option_string_actions)
        raise InputError(f"{message}; {_ALL_FLAGS}")


@functools.cache
def _sglang_parser() -> argparse.ArgumentParser:
    try:
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise InputError(import_problem(error)) from error
    load_plugins()
    parser = _OneLineParser(prog="sparrow serve")
    ServerArgs.add_cli_args(parser)
    return parser
