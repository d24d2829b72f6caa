"""The network of a run's actors, and the folders that they import from."""

import os
import sys
import sysconfig
from types import SimpleNamespace

import psutil
import pytest
import ray

from sparrow_sglang.rl.cluster.ray_session import actor_options, use_network_of_ray


def test_gloo_uses_the_network_of_ray_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses = {"lo": ["127.0.0.1"], "eth0": ["192.168.0.7"], "eth1": ["fe80::1", "10.0.0.2"]}
    interfaces = {
        name: [SimpleNamespace(address=address) for address in found]
        for name, found in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    # So that what the call sets is undone afterwards.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_network_of_ray()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    use_network_of_ray()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"


def test_actors_import_from_the_folders_of_the_user_wherever_these_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = [f"{sys.prefix}-tasks", f"{sys.base_prefix}/src/app"]
    installed = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    monkeypatch.setattr(sys, "path", [own[0], *installed, own[1]])
    variables = actor_options({})["runtime_env"]["env_vars"]
    assert variables["PYTHONPATH"].split(os.pathsep) == own
