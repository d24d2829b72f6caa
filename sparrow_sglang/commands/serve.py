"""`sparrow serve`: SGLang's own launcher with our defaults; every SGLang flag passes through.

In: the command line after `serve`. Out: a running server, or one error that says what to change.
SGLang is imported inside functions, because that takes some ten seconds and `--help` should not.
"""

import argparse
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sparrow_sglang.commands.server_flags import (
    ALL_FLAGS,
    MODEL_FLAGS,
    check_flags,
    check_port,
    names_model,
    unknown_flags,
)
from sparrow_sglang.errors import InputError
from sparrow_sglang.models import (
    EMBEDDED_MODEL_NAME,
    ModelError,
    model_folder,
    model_problem,
)
from sparrow_sglang.plugin.refusals import BACKEND, uses_sparrow
from sparrow_sglang.plugin.server_args import plugins_problem
from sparrow_sglang.sglang_arguments import config_file_merger, read_model_config, resolve
from sparrow_sglang.sglang_install import import_problem, version_problems

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

HELP = """\
usage: sparrow serve [--model-path MODEL] [--sparrow-schedule SCHEDULE] [SGLang flags ...]

Start an OpenAI-compatible SGLang server that decodes sparsely.

Prefill is dense. During decode, each new token reads only a budget of the cached tokens: the first
and the last pages, and between them the pages that matter most for this token. A schedule says how
the budget grows with the length of the sequence. Sequences that fit into the budget are decoded
densely.

examples:
  sparrow serve
      the small embedded model (SmolLM2-135M); works without a GPU, too
  sparrow serve --model-path Qwen/Qwen3-4B
      your model; the shipped schedule that was calibrated for it is chosen automatically
  sparrow serve --model-path Qwen/Qwen3-4B --sparrow-schedule fixed-4096 --port 8000
      the same budget of 4096 tokens at every length, and a flag of SGLang (--port)

defaults of sparrow, which your own flags override:
  --attention-backend sparrow    sparse decode
  --model-path smollm2-135m      the small model, converted at the first start (half a minute)
  --page-size 16                 tokens per page

All flags of SGLang work unchanged: sparrow serve --help-all lists them.
Does your model work? sparrow doctor --model-path MODEL
"""


def serve(argv: Sequence[str]) -> None:
    """Run a server until it is stopped. Raises `InputError` before it starts, if it cannot."""
    try:
        check_flags(argv)
        check_port(argv)
        server_args = parse_server_args(argv)
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(str(error)) from error
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    ready = False

    def announce_again() -> None:
        nonlocal ready
        ready = True
        _announce_again(server_args)

    try:
        if uses_sparrow(server_args) and not server_args.encoder_only:
            # Repeat the scheduler's line when the server is ready, after SGLang's own messages.
            launch_server(server_args, launch_callback=announce_again)
        else:
            run_server(server_args)
    except KeyboardInterrupt:
        # SGLang 0.5.20 re-raises the KeyboardInterrupt after it has stopped the server in order.
        if not ready:
            raise
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _announce_again(server_args: "ServerArgs") -> None:
    from sparrow_sglang.plugin.server_args import resolve_schedules
    from sparrow_sglang.plugin.server_log import announce, start_up_line

    hf_config = read_model_config(server_args).hf_config
    loaded, source = resolve_schedules(server_args, hf_config)
    url = f"http://{server_args.host}:{server_args.port}"
    announce(f"ready on {url}, {start_up_line(loaded, source, hf_config)}")


def print_all_flags() -> None:
    """Print the help of SGLang's own parser, which includes our flags."""
    _sglang_parser().print_help()


def parse_server_args(argv: Sequence[str]) -> "ServerArgs":
    """SGLang's ServerArgs for this command line and our defaults, checked by SGLang and by us.

    Raises:
        InputError: SGLang is missing or too old, an unknown flag, a wrong value, a file that cannot
            be read, or a model that is neither a folder nor on the hub.
        ValueError, RuntimeError, OSError: SGLang or the plugin refuses the arguments.
    """
    for problem in (*version_problems(), plugins_problem()):
        if problem is not None:
            raise InputError(problem)
    try:
        parser = _sglang_parser()
    except ImportError as error:
        raise InputError(import_problem(error)) from error
    full = with_defaults(_with_config_file(argv, parser))
    model_path = parser.parse_args(full).model_path
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(full)
        resolve(server_args)
        # SGLang asserts these only when it starts. Checked on a copy, as it parses paths of LoRA.
        copy.deepcopy(server_args).check_server_args()
        return server_args
    except AssertionError as error:
        raise InputError(" ".join(str(error).split()) or "SGLang refuses these flags") from error
    except OSError as error:
        if Path(model_path, "config.json").exists():
            raise
        problem = model_problem(model_path, error)
        raise InputError(f"{MODEL_FLAGS[0]} {model_path}: {problem}") from error


def with_defaults(argv: Sequence[str]) -> list[str]:
    """`argv` with our defaults in front, where the user's flags override them.

    The name of an embedded model is replaced by its folder; the model is converted if necessary.
    """
    given = list(argv)
    if given and not given[0].startswith("-"):
        given.insert(0, MODEL_FLAGS[0])
    if not names_model(given):
        given = [MODEL_FLAGS[0], EMBEDDED_MODEL_NAME, *given]
    resolved = [_resolve_name(given, i) for i in range(len(given))]
    defaults = ["--attention-backend", BACKEND]
    names = [
        word.rpartition("=")[2] for word, path in zip(given, resolved, strict=True) if word != path
    ]
    if names:
        # Let clients ask for the model by its name and not by a path in somebody's cache.
        defaults += ["--served-model-name", names[-1]]
    return defaults + resolved


def _resolve_name(argv: Sequence[str], i: int) -> str:
    flag, equals, value = argv[i].partition("=")
    try:
        if flag in MODEL_FLAGS and equals:
            return f"{flag}={model_folder(value)}"
        return model_folder(argv[i]) if i and argv[i - 1] in MODEL_FLAGS else argv[i]
    except ModelError as error:
        raise InputError(str(error)) from error


class _OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line: the usage text of SGLang's hundreds of flags would bury them."""

    def error(self, message: str) -> NoReturn:
        unknown, _, words = message.partition("unrecognized arguments: ")
        if not unknown and words:
            raise InputError(unknown_flags(words, self._option_string_actions))
        raise InputError(f"{message}; {ALL_FLAGS}")


def _sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = _OneLineParser(prog="sparrow serve")
    ServerArgs.add_cli_args(parser)
    return parser


def _config_words(word: str) -> list[str]:
    """`--config=FILE` as two words; any other word as it is."""
    return word.split("=", 1) if word.startswith("--config=") else [word]


def _with_config_file(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`argv` with the flags of a --config file put in front of the user's own.

    SGLang would put them in front of our defaults, which would then override the file.
    """
    # SGLang knows the two words only, and would pass over the file silently.
    words = [part for word in argv for part in _config_words(word)]
    if "--config" not in words:
        return words
    try:
        return config_file_merger(parser).merge_config_with_args(words)
    except ValueError as error:
        raise InputError(f"--config: {error}") from error
