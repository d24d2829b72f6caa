"""NCCL's settings that the trainer and the engines must share to exchange weights.

NCCL reads them once per process, when it makes its first communicator.
"""

import os
from collections.abc import Mapping
from typing import Any

_SERVER_ARGUMENTS = {
    "NCCL_CUMEM_ENABLE": ("enable_symm_mem",),
    "NCCL_NVLS_ENABLE": ("enable_symm_mem", "enable_nccl_nvls"),
}
"""Variables that SGLang sets in its processes, 0 unless one of these arguments is true
(`_set_envs_and_config` in 0.5.17)."""


def share_nccl_settings(server_args: Mapping[str, Any]) -> dict[str, str]:
    """Set NCCL's variables in this process as in SGLang's, and return them for the engines.

    A value that the user has exported stays. If the trainer had NCCL's defaults and the engines
    SGLang's, two GPUs of one machine would exchange memory handles of different kinds, and wait for
    each other for ever. Must be called before CUDA starts.
    """
    shared = {}
    for name, arguments in _SERVER_ARGUMENTS.items():
        if any(server_args.get(argument) for argument in arguments):
            os.environ[name] = "1"
        shared[name] = os.environ.setdefault(name, "0")
    return shared
