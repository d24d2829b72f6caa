"""`sparrow serve`: SGLang's own launcher with our defaults; every SGLang flag passes through.

In: the command line after `serve`. Out: a running server, or one error that says what to change.
SGLang is imported inside functions, because that takes some ten seconds and `--help` should not.
"""

import argparse
import copy
import errno
import functools
import os
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sparrow_sglang.command_line import exit_on_sigterm
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import cut
from sparrow_sglang.models import (
    EMBEDDED_MODEL_NAME,
    ModelError,
    missing_tokenizer,
    missing_weights,
    model_folder,
    model_problem,
    path_problem,
)
from sparrow_sglang.plugin.refusals import BACKEND, uses_sparrow
from sparrow_sglang.plugin.server_args import plugins_problem
from sparrow_sglang.sglang_arguments import config_file_merger, read_model_config, resolve
from sparrow_sglang.sglang_install import import_problem, version_problems
from sparrow_sglang.validation import nearest_first

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

flags of sparrow:
  --sparrow-schedule NAMES       a shipped schedule (sparrow schedules lists them), a .json file or
                                 fixed-<tokens>; after commas, others that requests may ask for
  --sparrow-dense-backend NAME   prefill by this backend of SGLang on a GPU (fa3, flashinfer,
                                 triton) instead of the one that SGLang would choose
  --sparrow-audit-rate SHARE     score this share of finished requests again, densely, to measure
                                 how far sparse decode deviates (0 to 1; 0.01 is a good start)
  --sparrow-audit-log FOLDER     write what the audit finds into this folder

All flags of SGLang work unchanged: sparrow serve --help-all lists them.
Does your model work? sparrow doctor --model-path MODEL
"""

_MODEL_FLAGS = ("--model-path", "--model")
_ALL_FLAGS = "sparrow serve --help-all lists the flags"
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", "30000"


def serve(argv: Sequence[str]) -> None:
    """Run a server until it is stopped. Raises `InputError` before it starts, if it cannot."""
    try:
        check_port(argv)
        server_args = parse_server_args(argv)
        for problem in missing_files(server_args):
            raise InputError(f"{_MODEL_FLAGS[0]}: {problem}")
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

    _explain_interrupts()
    exit_on_sigterm()
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


def _explain_interrupts() -> None:
    """Say at the first Ctrl-C what the server waits for; end at once at the second.

    uvicorn then finishes the requests under way. At the second one SGLang would print tracebacks.
    """
    import uvicorn
    from sglang.srt.utils import kill_process_tree

    original = uvicorn.Server.handle_exit

    def handle_exit(server: Any, sig: int, frame: Any) -> None:
        if sig == signal.SIGINT:
            if server.should_exit:
                print("sparrow serve: stopped", file=sys.stderr, flush=True)
                kill_process_tree(os.getpid(), include_parent=False)
                os._exit(130)
            running = len(server.server_state.tasks)
            if running:
                print(
                    f"sparrow serve: waiting for {running} requests under way; press Ctrl-C again"
                    " to stop at once",
                    file=sys.stderr,
                    flush=True,
                )
        original(server, sig, frame)

    uvicorn.Server.handle_exit = handle_exit  # type: ignore


def _announce_again(server_args: "ServerArgs") -> None:
    from sparrow_sglang.plugin.server_args import resolve_schedule
    from sparrow_sglang.plugin.server_log import announce, start_up_line

    hf_config = read_model_config(server_args).hf_config
    schedule, source = resolve_schedule(server_args, hf_config)
    url = f"http://{server_args.host}:{server_args.port}"
    announce(f"ready on {url}, {start_up_line(schedule, source, hf_config)}")


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
    model = model_argument(argv)
    if model is not None and (problem := path_problem(model)):
        raise InputError(f"{_MODEL_FLAGS[0]} {model}: {problem}")
    full = with_defaults(_with_config_file(argv))
    model_path = _sglang_parser().parse_args(full).model_path
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(full)
        resolve(server_args)
        # SGLang asserts these only when it starts. Checked on a copy, as it parses paths of LoRA.
        copy.deepcopy(server_args).check_server_args()
        return server_args
    except AssertionError as error:
        raise InputError(" ".join(str(error).split()) or "SGLang refuses these flags") from error
    except (ValueError, RuntimeError):
        raise
    except Exception as error:
        # On a config that they do not expect, transformers and SGLang raise anything.
        if isinstance(error, OSError) and Path(model_path, "config.json").exists():
            raise
        problem = model_problem(model_path, error)
        raise InputError(f"{_MODEL_FLAGS[0]} {model_path}: {problem}") from error


def missing_files(server_args: "ServerArgs") -> list[str]:
    """What a model's folder lacks that a server would load, a line each; names of a hub are not
    looked into."""
    folder = Path(server_args.model_path)
    if not folder.is_dir():
        return []
    weights = None if server_args.load_format == "dummy" else missing_weights(folder)
    own_tokenizer = server_args.tokenizer_path in (None, server_args.model_path)
    skipped = server_args.skip_tokenizer_init or not own_tokenizer
    tokenizer = None if skipped else missing_tokenizer(folder)
    return [problem for problem in (weights, tokenizer) if problem]


def with_defaults(argv: Sequence[str]) -> list[str]:
    """`argv` with our defaults in front, where the user's flags override them.

    The name of an embedded model is replaced by its folder; the model is converted if necessary.
    """
    given = list(argv)
    if given and not given[0].startswith("-"):
        given.insert(0, _MODEL_FLAGS[0])
    if model_argument(given) is None:
        given = [_MODEL_FLAGS[0], EMBEDDED_MODEL_NAME, *given]
    resolved = [_resolve_name(given, i) for i in range(len(given))]
    defaults = ["--attention-backend", BACKEND]
    names = [
        word.rpartition("=")[2] for word, path in zip(given, resolved, strict=True) if word != path
    ]
    if names:
        # Let clients ask for the model by its name and not by a path in somebody's cache.
        defaults += ["--served-model-name", names[-1]]
    return defaults + resolved


def model_argument(argv: Sequence[str]) -> str | None:
    """The model that a command line names by a flag or as its first word, else None."""
    first = argv[0] if argv and not argv[0].startswith("-") else None
    return _value(argv, *_MODEL_FLAGS) or first


def _resolve_name(argv: Sequence[str], i: int) -> str:
    flag, equals, value = argv[i].partition("=")
    try:
        if flag in _MODEL_FLAGS and equals:
            return f"{flag}={model_folder(value)}"
        return model_folder(argv[i]) if i and argv[i - 1] in _MODEL_FLAGS else argv[i]
    except ModelError as error:
        raise InputError(str(error)) from error


def check_port(argv: Sequence[str]) -> None:
    """Raise `InputError` if the server could not listen at its host and port, which SGLang notices
    only once the model is loaded."""
    argv = _with_config_file(argv)
    host = _value(argv, "--host") or _DEFAULT_HOST
    port = _value(argv, "--port") or _DEFAULT_PORT
    if not port.isdecimal():
        return
    if not 0 < int(port) < 65536:
        raise InputError(f"--port {port}: expected a port from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            # Set as the server sets it, so that recently closed connections do not block the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise InputError(
                f"--port {port}: another process listens on {host}:{port}; stop it, or choose"
                f" another port, such as --port {int(port) + 1}"
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"--host {cut(host)} --port {port}: cannot listen there ({reason}); expected a name or"
            " an address of this machine, and a port that this user may open"
        ) from None


def _value(argv: Sequence[str], *flags: str) -> str | None:
    """The last value given to one of `flags`, which overrides the others."""
    last = None
    for word, following in zip_longest(argv, argv[1:]):
        flag, equals, value = word.partition("=")
        if flag in flags:
            last = value if equals else following
    return last


class _OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line: the usage text of SGLang's hundreds of flags would bury them."""

    def error(self, message: str) -> NoReturn:
        before, unknown, words = message.partition("unrecognized arguments: ")
        if unknown and not before:
            flag = words.split()[0].partition("=")[0]
            near = nearest_first(flag, self._option_string_actions, cutoff=0.6)
            message += f" (did you mean {near[0]}?)" if near else ""
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


def _with_config_file(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags of a --config file put in front of the user's own.

    SGLang would put them in front of our defaults, which would then override the file.
    """
    # SGLang knows the two words only, and would pass over the file silently.
    words = [
        part
        for word in argv
        for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    if "--config" not in words:
        return words
    try:
        return config_file_merger(_sglang_parser()).merge_config_with_args(words)
    except ValueError as error:
        raise InputError(f"--config: {error}") from error
