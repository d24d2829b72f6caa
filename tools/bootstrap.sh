#!/bin/sh
# Makes a virtual environment with Python 3.11 or 3.12, and finds or installs uv.
#
#   sh tools/bootstrap.sh VENV
#
# Leaves VENV/bin/python and the path of uv in VENV/.uv. PYTHON=... names the Python to use.
set -eu

venv=$1
tools=build/tools

fail() {
    echo "setup: $1" >&2
    exit 1
}

# By running it: pyenv and others put names on the path that only print an error.
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.11 python3 python; do
        if supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 found; install one, or name it: make PYTHON=/path/to/python3.12"
}

# Prints the path of uv, installing it if need be into a folder of this checkout.
find_uv() {
    if uv --version >/dev/null 2>&1; then
        command -v uv
        return
    fi
    if [ ! -x "$tools/bin/uv" ]; then
        echo "setup: installing uv into $tools" >&2
        # --target is allowed where the system's Python is externally managed (PEP 668).
        "$python" -m pip install --quiet --target "$tools" uv >&2 ||
            { "$python" -m venv "$tools" && "$tools/bin/python" -m pip install --quiet uv >&2; } ||
            fail "cannot install uv with $python -m pip; see https://docs.astral.sh/uv/ and install it"
    fi
    echo "$tools/bin/uv"
}

python=$(find_python)
uv=$(find_uv)
if [ -x "$venv/bin/python" ] && supported "$venv/bin/python"; then
    echo "setup: using the existing $venv" >&2
else
    rm -rf "$venv"
    "$uv" venv --quiet --python "$python" "$venv"
fi
echo "$uv" >"$venv/.uv"
