"""The command `sparrow`: parse, call, print."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from sparrow_sglang import doctor, serve

DESCRIPTION = """\
Sparse decode for stock SGLang: while generating, each token reads a budget of KV pages that grows
with the length of the sequence, instead of all of them.
"""

EPILOG = """\
examples:
  sparrow doctor                                   is this machine ready?
  sparrow serve                                    a server with the small model that comes along
  sparrow serve --model-path Qwen/Qwen3-4B         a server with your model

sparrow COMMAND --help says more about a command.
"""

DOCTOR_HELP = """\
Check whether sparse decode works here, in the order in which a server would stumble: versions,
entry points, environment, plugin, platform, model, schedule. One line per check; exit code 1 if one
failed. Takes the flags of `sparrow serve`, and loads no weights.
"""

DOCTOR_EPILOG = """\
examples:
  sparrow doctor
  sparrow doctor --model-path Qwen/Qwen3-4B
  sparrow doctor --model-path Qwen/Qwen3-4B --sparrow-schedule my-schedule.json --page-size 32
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="sparrow", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=version("sparrow-sglang"))
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="start an OpenAI-compatible server", add_help=False)
    commands.add_parser(
        "doctor",
        help="check machine, SGLang, plugin and model",
        usage="sparrow doctor [--model-path MODEL] [SGLang flags ...]",
        description=DOCTOR_HELP,
        epilog=DOCTOR_EPILOG,
        formatter_class=raw,
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 if it failed, 2 if the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    # SGLang's modules warn, when imported, of everything that this machine does not have.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    # These two hand their flags to SGLang, which alone knows them.
    if words[:1] == ["serve"]:
        return _serve(words[1:])
    if words[:1] == ["doctor"] and not {"-h", "--help"} & set(words):
        return _doctor(words[1:])
    _parser().parse_args(words)
    return 0


def _serve(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(serve.HELP, end="")
        return 0
    try:
        if "--help-all" in argv:
            serve.print_all_flags()
        else:
            serve.serve(argv)
    except serve.ServeError as error:
        print(f"sparrow serve: error: {error}", file=sys.stderr)
        return 2
    return 0


def _doctor(argv: Sequence[str]) -> int:
    failed = False
    for check in doctor.examine(argv):
        print(f"{check.status:<5} {check.name:<12} {check.detail}", flush=True)
        failed = failed or check.status == "FAIL"
    print("Something is in the way; see FAIL above." if failed else "All good.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
