"""Which mode a server runs in."""

from typing import TYPE_CHECKING

from sparrow_sglang.plugin.lossless.mode import Lossless
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.names import names_lossless

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_SPARSE, _LOSSLESS = Mode(), Lossless()


def mode_of(server_args: "ServerArgs") -> Mode:
    """The mode of a server with this backend."""
    return mode_with(server_args.speculative_algorithm)


def mode_with(algorithm: str | None) -> Mode:
    """The mode of a server with that --speculative-algorithm."""
    return _LOSSLESS if names_lossless(algorithm) else _SPARSE
