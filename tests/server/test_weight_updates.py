"""Weights that do not fit are refused by name; the old ones serve on, also requests in flight."""

import base64
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from engines import SCHEDULE, random_prompt, save_tiny_model, sparse
from safetensors.torch import load_file, save_file
from servers import running_requests, start_server
from waiting import wait_until

from sparrow_sglang.sglang_compat.versions import LOSSLESS_NEEDS, resolve_target

QUERY = "model.layers.0.self_attn.q_proj.weight"
WRONG = f"{QUERY} is [3, 3]: expected [144, 144]"
UNKNOWN = "module.q.weight [3]: the model has no tensor of that name"
PROMPT = random_prompt(0, 120)
LOSSLESS = {"speculative_algorithm": "SPARROW", "speculative_num_draft_tokens": 5}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["sparse", "lossless"])
def client(request: pytest.FixtureRequest, sharp_llama: str) -> Iterator[httpx.Client]:
    drafts = LOSSLESS if request.param == "lossless" else {}
    if drafts and not all(map(resolve_target, LOSSLESS_NEEDS)):
        pytest.skip("this SGLang has no lossless decoding")
    arguments = sparse(SCHEDULE) | drafts
    with (
        start_server(sharp_llama, page_size=16, log_level="critical", **arguments) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights of the same model."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1, spread=0.15)


def weights_of(folder: str | Path) -> Weights:
    return load_file(Path(folder) / "model.safetensors")


def generated(client: httpx.Client, new_tokens: int = 40) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": PROMPT, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


@contextmanager
def unharmed(client: httpx.Client) -> Iterator[None]:
    """A request in flight meanwhile has the tokens of the old weights, and so has a later one."""
    expected, got = generated(client, 300), []
    thread = threading.Thread(target=lambda: got.extend(generated(client, 300)))
    thread.start()
    wait_until(lambda: running_requests(client))
    yield
    thread.join()
    assert got == expected == generated(client, 300)


def post(client: httpx.Client, route: str, **body: Any) -> tuple[int, str]:
    answer = client.post(f"/{route}", json=body)
    return answer.status_code, answer.json()["message"]


def saved(model: str, folder: Path, change: Callable[[Weights], Weights]) -> str:
    shutil.copytree(model, folder)
    save_file(change(weights_of(model)), folder / "model.safetensors")
    return str(folder)


def test_folders(client: httpx.Client, other: str, tmp_path: Path) -> None:
    half, unlisted = shutil.copytree(other, tmp_path / "half"), tmp_path / "unlisted"
    file = half / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-500])
    shutil.copytree(other, unlisted)
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    (unlisted / "model.safetensors.index.json").write_text(index)
    wrong = saved(other, tmp_path / "wrong", lambda of: of | {QUERY: torch.zeros(3, 3)})
    renamed = saved(other, tmp_path / "renamed", lambda of: {f"base.{k}": of[k] for k in of})
    with unharmed(client):
        for folder, said in (
            (half, f"{file} is incomplete or damaged"),
            (tmp_path / "none", f"model_path {tmp_path}/none: no such folder; expected"),
            (unlisted, f"{unlisted} lacks 1 of 1 files"),
            (wrong, f"{wrong}/model.safetensors: {WRONG}"),
            (renamed, f"{renamed}/model.safetensors: base.lm_head.weight [256, 144]"),
        ):
            status, found = post(client, "update_weights_from_disk", model_path=str(folder))
            assert status == 400 and said in found
        assert running_requests(client)


def serialized(value: Any) -> list[str]:
    from sglang.srt.utils import MultiprocessingSerializer

    return [base64.b64encode(MultiprocessingSerializer.serialize(value)).decode()]


def bucket(tensors: Weights) -> list[str]:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    flat = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    parts = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return serialized(parts)


def has_sessions(client: httpx.Client) -> bool:
    return client.post("/begin_weight_update", json={}).status_code == 200


@pytest.mark.parametrize("session", [False, True])
def test_tensors(client: httpx.Client, other: str, session: bool) -> None:
    if session and not has_sessions(client):
        pytest.skip("weights come without a session")
    # Updates that keep the KV of a request in flight do not wait for it.
    keep = {"flush_cache": False}
    flat = keep | {"load_format": "flattened_bucket"}
    good = weights_of(other)
    with unharmed(client):
        for payload, fields, said in (
            (["AAAA"], keep, "could not load the weights"),
            ([], keep, "could not load the weights (IndexError"),
            (serialized(["name"]), keep, "could not load the weights (ValueError"),
            (serialized([(QUERY, torch.zeros(3, 3))]), keep, WRONG),
            (serialized([*good.items(), ("module.q.weight", torch.zeros(3))]), keep, UNKNOWN),
            (serialized(good), flat, "could not load the weights (KeyError"),
            (bucket(good | {QUERY: torch.zeros(3, 3)}), flat, WRONG),
            (bucket(good | {"module.q.weight": torch.zeros(3)}), flat, UNKNOWN),
            (serialized([(QUERY, good[QUERY])]), keep | {"load_format": "direct"}, "KeyError"),
            (serialized([*good.items()]), keep | {"load_format": "other"}, "load_format=other"),
        ):
            status, found = post(
                client, "update_weights_from_tensor", serialized_named_tensors=payload, **fields
            )
            assert status == 400 and said in found, said
        about = {"names": [QUERY], "dtypes": ["float32"], "shapes": [[144, 144]]} | keep
        about["group_name"] = "of_nobody"
        status, found = post(client, "update_weights_from_distributed", **about)
        assert status == 400 and "Group of_nobody not in" in found
        if session:
            assert post(client, "end_weight_update")[0] == 200


def test_half_of_the_tensors(
    client: httpx.Client, sharp_llama: str, other: str, tmp_path: Path
) -> None:
    half = saved(other, tmp_path / "half", lambda of: {k: of[k] for k in sorted(of)[::2]})
    before = generated(client)
    status, said = post(client, "update_weights_from_disk", model_path=half)
    assert status == 200 and "20 of 39 tensors were updated, not model.embed_tokens.weight" in said
    assert generated(client) != before
    status, said = post(client, "update_weights_from_disk", model_path=sharp_llama)
    assert status == 200 and "tensors" not in said
    whole = list(weights_of(sharp_llama).items())
    sessions = has_sessions(client)
    for part in (whole[::2], []):
        payload = serialized(part)
        status, said = post(client, "update_weights_from_tensor", serialized_named_tensors=payload)
        assert status == 200
        assert ("20 of 39" if sessions or part else "0 of 39") in said
    if sessions:
        assert "Partial weight update: 20 of 39" in post(client, "end_weight_update")[1]
        # A whole one, in buckets.
        client.post("/begin_weight_update", json={})
        for items in (whole[:10], whole[10:]):
            post(client, "update_weights_from_tensor", serialized_named_tensors=serialized(items))
        assert post(client, "end_weight_update") == (200, "Success")
    assert generated(client) == before


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_a_refused_broadcast_is_not_taken_for_the_next_one(
    client: httpx.Client, sharp_llama: str, other: str, load_format: str | None
) -> None:
    """A trainer sends whether or not the server takes it."""
    from sglang.srt.utils import init_custom_process_group

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    name = f"weights-{load_format}"
    group = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
    }
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(post, client, "init_weights_update_group", **group)
        here = init_custom_process_group(
            backend="gloo",
            store=dist.PrefixStore(name, store),
            world_size=2,
            rank=0,
            group_name=name,
            timeout=timedelta(seconds=60),
        )
        assert joined.result()[0] == 200

        def send(tensors: Weights) -> tuple[int, str]:
            answer = pool.submit(
                post,
                client,
                "update_weights_from_distributed",
                names=list(tensors),
                dtypes=["float32"] * len(tensors),
                shapes=[list(tensor.shape) for tensor in tensors.values()],
                group_name=name,
                load_format=load_format,
            )
            sent = list(tensors.values())
            if load_format:
                sent = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent])]
            for tensor in sent:
                dist.broadcast(tensor, group=here, group_src=0)
            return answer.result()

        post(client, "update_weights_from_disk", model_path=other)
        expected = generated(client)
        post(client, "update_weights_from_disk", model_path=sharp_llama)
        before = generated(client)
        noise = {key: torch.randn_like(value) for key, value in weights_of(other).items()}
        has_sessions(client)
        assert send(noise | {QUERY: torch.zeros(3, 3)}) == (
            400,
            f"the weights were not updated: {WRONG}",
        )
        assert generated(client) == before
        assert send(weights_of(other))[0] == 200
        client.post("/end_weight_update", json={})
        assert generated(client) == expected != before
        client.post("/destroy_weights_update_group", json={"group_name": name})
        dist.destroy_process_group(here)
    post(client, "update_weights_from_disk", model_path=sharp_llama)
