"""Entry point of SGLang's platforms, which SGLang runs during `import sglang`. It gives SGLang a
platform where there is no accelerator, and installs our command-line arguments. SGLang is only half
imported at that moment, so this file must not import it at the top."""

import importlib.util
import os

import torch

from sparrow_sglang.plugin import server_args
from sparrow_sglang.processes import ignore_sigint_if_shielded

CPU_PLATFORM = "sparrow_sglang.plugin.cpu.platform:SparrowCpuPlatform"


def activate() -> str | None:
    """Qualified name of the CPU platform, or None where SGLang has a platform of its own."""
    ignore_sigint_if_shielded()
    server_args.install_on_import()
    # The variable selects SGLang's own CPU engine, which needs Intel AMX.
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or has_accelerator():
        return None
    return CPU_PLATFORM


def has_accelerator() -> bool:
    """Whether this machine has a device that SGLang should serve from."""
    return (
        torch.cuda.is_available()  # ROCm too
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        # These packages add their device to torch on import, which may not have happened yet.
        or any(
            importlib.util.find_spec(name) is not None
            for name in ("torch_npu", "habana_frameworks", "torch_musa")
        )
    )
