"""Raises an error where SGLang decodes without the attention backend, and therefore densely: at the
latest in the third decode step that bypasses the backend. Costs a few integers a step."""

from sparrow_sglang.errors import SparrowError

LIMIT = 2
"""Steps that may be begun before one of them must have been served. SGLang prepares a step while
the previous one runs, so a limit of 1 would be too low."""


class DecodeGuard:
    """Counts decode steps that were begun since the backend last served one."""

    def __init__(self) -> None:
        self._unplanned = 0
        self._unserved = 0
        self._ever_served = False

    def announced(self) -> None:
        """SGLang built a decode batch. Raises `SparrowError` if earlier ones were not planned."""
        if self._unplanned == LIMIT:
            raise _bypassed("plan")
        self._unplanned += 1

    def planned(self, captured: bool = False) -> None:
        """The backend has planned a decode step, of a CUDA graph if `captured`. A graph calls no
        layer when it is replayed. Raises `SparrowError` if SGLang did not have the backend compute
        the steps planned before."""
        self._unplanned = 0
        if captured:
            return
        if self._unserved == LIMIT:
            raise _bypassed("compute")
        self._unserved += 1

    def replayed(self) -> None:
        """A captured graph is about to run. Raises `SparrowError` if no layer was captured."""
        if not self._ever_served:
            raise _bypassed("compute")

    def served(self) -> None:
        """The backend computes a layer of a decode step."""
        self._unserved = 0
        self._ever_served = True


def _bypassed(what: str) -> SparrowError:
    return SparrowError(
        f"SGLang decodes without having the attention backend 'sparrow' {what} the steps, which"
        " would be dense decode: an option or a version of SGLang that sparrow-sglang does not"
        " know; choose another --attention-backend, or leave the option out"
    )
