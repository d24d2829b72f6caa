"""The network of a run's actors."""

import os
from types import SimpleNamespace

import psutil
import pytest
import ray

from sparrow_sglang.rl.cluster.ray_session import use_network_of_ray


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
