"""Runs the folders of tests at once, in forks of one process that has imported SGLang. The import
takes 20 s of processor time. Not pytest-xdist, which waits for ever for a worker that a failing
engine has killed."""

import gc
import os
import signal
import sys
import warnings

FOLDERS = (
    ("tests/engine", "--ignore=tests/engine/rl"),
    ("tests/engine/rl",),
    # `make fuzz` runs this.
    ("tests/server", "--ignore=tests/server/test_fuzz.py"),
    ("tests/processes",),
)
# These only compute, so they leave the processor to tests that also wait for processes, and get
# more time.
PATIENT = (("tests/unit", "--timeout", "1800"), ("tests/gpu", "--timeout", "1800"))


def main(flags: list[str]) -> int:
    # As in conftest.py, which comes too late for what is imported here.
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.set_threshold(100_000)
    # Processes that tests spawn import this module, and need none of these.
    import pytest
    from engines import import_for_fork

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_for_fork()
    children = {}
    for arguments in (*FOLDERS, *PATIENT):
        child = os.fork()
        if not child:
            os.nice(15 if arguments in PATIENT else 0)
            # pytest could rewrite assertions of a plugin of anyio, had SGLang not imported it.
            ignored = "ignore::pytest.PytestAssertRewriteWarning"
            return pytest.main([*arguments, "-W", ignored, *flags])
        children[child] = arguments[0]
    # Ctrl-C reaches the children, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(child, signal.SIGTERM) for child in children])
    exit_codes = {
        folder: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for child, folder in children.items()
    }
    # An engine that dies kills its parent, which then reports nothing.
    for folder, code in exit_codes.items():
        if code:
            print(f"{folder}: exit code {code}", file=sys.stderr)
    return any(exit_codes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
