"""The Ray cluster of a run, and the options that its actors share."""

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray

from sparrow_sglang.errors import InputError
from sparrow_sglang.rl.config import ClusterConfig

_NCCL_ARGUMENTS = {
    "NCCL_CUMEM_ENABLE": ("enable_symm_mem",),
    "NCCL_NVLS_ENABLE": ("enable_symm_mem", "enable_nccl_nvls"),
}
"""Variables that SGLang sets, 0 unless an argument is true (`_set_envs_and_config`, 0.5.17)."""


@contextmanager
def connected(config: ClusterConfig) -> Iterator[None]:
    """A driver of the Ray cluster that `RAY_ADDRESS` names or that runs here, else of one started
    for the block. Raises `InputError` if the cluster has GPUs, but too few."""
    started = not ray.is_initialized()
    if started:
        # Ray's processes have half a minute to start, which is too short if cores are busy.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        # Ray's workers have a low priority, at which engines starve beside trainers on the CPU.
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(include_dashboard=False, log_to_driver=False)
    try:
        gpus, needed = ray_gpus(), config.gpus
        if 0 < gpus < needed:
            raise InputError(
                f"cluster.trainers={config.trainers} and engines={config.engines} need {needed}"
                f" GPUs: Ray has {gpus}; add hosts by `ray start`"
            )
        yield
    finally:
        if started:
            ray.shutdown()


def ray_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def actor_options(server_args: Mapping[str, Any], **variables: str) -> dict[str, Any]:
    """Ray's options of an actor that needs no CPU of its own. It imports from the same folders as
    this process, for tasks and rewards of the user, and has NCCL's settings of SGLang's processes,
    which depend on `server_args`: otherwise two GPUs of one host would exchange memory handles of
    different kinds, and wait for each other for ever. Values that the user exported stay."""
    # If exported for all of Ray, as some frameworks require, trainers would share one GPU.
    variables.setdefault("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0")
    for name, arguments in _NCCL_ARGUMENTS.items():
        enabled = any(server_args.get(argument) for argument in arguments)
        variables[name] = "1" if enabled else os.environ.get(name, "0")
    installed = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
    folders = [os.path.abspath(folder) for folder in sys.path]
    outside = [folder for folder in folders if not folder.startswith(installed)]
    variables["PYTHONPATH"] = os.pathsep.join(outside)
    return {"num_cpus": 0, "runtime_env": {"env_vars": variables}}


def use_network_of_ray() -> None:
    """By itself, gloo takes the address of the host's name, often 127.0.0.1."""
    address = ray.util.get_node_ip_address()
    for name, interfaces in psutil.net_if_addrs().items():
        if any(interface.address == address for interface in interfaces):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
