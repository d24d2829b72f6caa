"""`sparrow doctor` on a model that is not there."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from ports import free_port

from sparrow_sglang.commands import cli, doctor
from sparrow_sglang.models import missing_weights, model_problem

LLAMA = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", %s}'
ALLOWED = "expected an existing folder with a config.json, or a hub id such as Qwen/Qwen3-4B"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The hub's client has read the variable at its import, maybe long before this test.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def problem(*argv: str) -> str:
    (check,) = [check for check in doctor.examine(argv) if check.name == "model"]
    assert check.status == "FAIL" and "\n" not in check.detail
    return check.detail


@pytest.mark.parametrize(("path", "form"), [("/no/folder", "--model={}"), ("./none", "{}")])
def test_a_path_that_is_not_there_is_no_such_folder(path: str, form: str) -> None:
    found = problem(*form.format(path).split())
    relative = "" if path.startswith("/") else f" (relative to {Path.cwd()})"
    assert found == f"--model-path {path}: no such folder{relative}; {ALLOWED}"


def test_a_file_is_no_model() -> None:
    assert problem("--model", __file__) == f"--model-path {__file__}: it is a file; {ALLOWED}"


def test_a_hub_that_cannot_be_reached_is_not_called_a_missing_model() -> None:
    error = OSError("We couldn't connect to the hub")
    error.__cause__ = LocalEntryNotFoundError("no connection")
    found = model_problem("nobody/has-this-model", error)
    assert "the Hugging Face hub cannot be reached" in found and "no such model" not in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "config.json: holds a list"),
        ("{", "config.json: not JSON"),
        ('{"architectures": null}', "architectures=None in its config.json: expected a list"),
        ('{"architectures": []}', "architectures=[] in its config.json: expected a list"),
        ("[" * 100_000, "config.json: not JSON"),
        (LLAMA % '"rms_norm_eps": "small"', "Field 'rms_norm_eps' expected float, got str"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    named = ["--model-path", str(tmp_path)]
    served = [*named, "--load-format", "dummy", "--sparrow-schedule", "fixed-512"]
    found = problem(*served)
    assert found.startswith(f"--model-path {tmp_path}: ") and said in found
    (tmp_path / "run.toml").write_text(
        f"run_dir = '{tmp_path}/run'\nmodel.path = '{tmp_path}'\ntask.name = 'story'\n"
    )
    port = str(free_port())
    for argv in (
        ["serve", *served, "--port", port],
        ["calibrate", *named],
        ["train", f"{tmp_path}/run.toml"],
    ):
        assert cli.main(argv) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 5\n",
        b"",
        b"<html>not found</html>",
        b"\x02" + bytes(7) + b"[]",
        None,
    ],
)
def test_weights_that_were_not_downloaded_whole_are_named(
    tiny_llama: str, tmp_path: Path, content: bytes | None
) -> None:
    [source] = Path(tiny_llama).glob("*.safetensors")
    assert missing_weights(Path(tiny_llama)) is None
    whole = source.read_bytes()
    (tmp_path / source.name).write_bytes(whole[:-1] if content is None else content)
    found = missing_weights(tmp_path) or ""
    assert found.startswith(f"{tmp_path / source.name} is incomplete or damaged")
