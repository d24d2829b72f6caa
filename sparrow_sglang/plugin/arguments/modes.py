"""Which mode a server runs in."""

from typing import TYPE_CHECKING

from sparrow_sglang.plugin.lossless.mode import Lossless
from sparrow_sglang.plugin.mode import Mode
from sparrow_sglang.plugin.names import LOSSLESS

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_SPARSE, _LOSSLESS = Mode(), Lossless()


def mode_of(server_args: "ServerArgs") -> Mode:
    """The mode of a server with this backend."""
    # SGLang accepts the name in lower case, too.
    is_lossless = (server_args.speculative_algorithm or "").upper() == LOSSLESS
    return _LOSSLESS if is_lossless else _SPARSE
