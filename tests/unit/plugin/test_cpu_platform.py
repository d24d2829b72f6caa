"""Which machines get the CPU platform, and what a rank of it compiles."""

import pytest
import torch

from sparrow_sglang.plugin import registration
from sparrow_sglang.plugin.cpu.fallbacks import prepare_rank


class TestActivate:
    """Which machines get the platform. SGLang's argument class is not under test here."""

    @pytest.fixture(autouse=True)
    def plain_cpu(self, monkeypatch):
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        monkeypatch.setattr(registration.server_args, "install_on_import", lambda: None)
        for device in (torch.cuda, torch.xpu, torch.backends.mps):
            monkeypatch.setattr(device, "is_available", lambda: False)
        monkeypatch.setattr(registration.importlib.util, "find_spec", lambda name: None)

    @pytest.mark.parametrize("device", ["cuda", "xpu", "backends.mps"])
    def test_declines_next_to_an_accelerator(self, monkeypatch, device):
        monkeypatch.setattr(f"torch.{device}.is_available", lambda: True)
        assert registration.activate() is None

    def test_declines_when_the_user_asks_for_sglangs_cpu_engine(self, monkeypatch):
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        assert registration.activate() is None


def test_nothing_is_compiled_in_a_rank():
    def refuse(*_):
        raise AssertionError("compiled")

    compiled = torch.compile(torch.neg, backend=refuse)
    with pytest.raises(Exception, match="compiled"):
        compiled(torch.ones(1))
    with torch.compiler.set_stance("default"):
        prepare_rank(tp_size=1)
        assert compiled(torch.ones(1)) == -1
