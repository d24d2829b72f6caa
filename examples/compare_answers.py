"""Does sparse decode keep the answers? The same held-out prompts under several schedules, paired.

python compare_answers.py run.toml http://127.0.0.1:30000 --schedules dense qwen3-4b-0.86 fixed-1024
python compare_answers.py run.toml http://127.0.0.1:30001 --name lossless

The file is one of `sparrow train`: [task] has prompts and reward, [evaluation] how many prompts and
how answers are sampled, [model] the tokenizer. The server's schedule is switched, and set back at
the end; without --schedules the server answers as it is, dense or lossless. Further calls, to other
servers too, add rows to --out. Each row is compared with the first one of its held-out set.
"""

import argparse
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest
from transformers import AutoTokenizer

from sparrow_sglang import get_schedule, set_schedule
from sparrow_sglang.atomic_write import write_json
from sparrow_sglang.client.endpoint import connect
from sparrow_sglang.errors import InputError, SparrowError
from sparrow_sglang.json_values import read_object
from sparrow_sglang.models import model_folder
from sparrow_sglang.provenance import provenance
from sparrow_sglang.rl.config import TrainConfig
from sparrow_sglang.rl.engines.responses import response_text
from sparrow_sglang.rl.rollout import Sampling, continued, sample_request
from sparrow_sglang.rl.tasks import ChatRender, load_task
from sparrow_sglang.rl.tasks.rewards import RewardPool
from sparrow_sglang.rl.types import Group, Prompt, known_rewards

Row = dict[str, Any]


def compared(first: Row, row: Row) -> Row:
    """The pass rate of `row` and its difference from `first`, over prompts that both answered.

    A prompt counts by the share of its answers that pass. 95 % intervals: Wilson's, a prompt being
    a trial; for differences Agresti and Min's (2005), half a count added to each cell of the paired
    table. `p_value`: exact sign test over prompts; with one answer a prompt this is McNemar's.
    """
    shared = sorted(first["passed"].keys() & row["passed"].keys())
    if not shared:
        raise InputError("no prompt has a reward in both rows: expected those of the rows in --out")
    before, after = (np.array([each["passed"][key] for key in shared]) for each in (first, row))
    count, gaps = len(shared), after - before
    better, worse = int((gaps > 0).sum()), int((gaps < 0).sum())
    centre = gaps.sum() / (count + 2)
    reach = 1.96 * np.sqrt((gaps**2).sum() + 1 - gaps.sum() * centre) / (count + 2)
    wilson = binomtest(round(after.sum()), count).proportion_ci(method="wilson")
    return {
        "prompts": count,
        "pass_rate": float(after.mean()),
        "pass_rate_interval": [float(wilson.low), float(wilson.high)],
        "difference": float(gaps.mean()),
        "difference_interval": [float(centre - reach), float(centre + reach)],
        "better": better,
        "worse": worse,
        "p_value": float(binomtest(better, better + worse).pvalue) if better + worse else 1.0,
    }


def generate_answers(
    url: str, prompts: Sequence[Prompt], config: TrainConfig, tokenizer: Any, report: bool
) -> tuple[list[Group], Row]:
    """Answers under the active schedule, with their seconds and mean tokens."""
    chosen, limit = config.evaluation, config.evaluation_tokens
    sampling = Sampling(limit, chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k)
    begun = [Group.begun(prompt, chosen.samples_per_prompt) for prompt in prompts]
    rollouts = [rollout for group in begun for rollout in group.rollouts]
    requests = [sample_request(rollout, sampling) for rollout in rollouts]
    for request in requests if report else ():
        request["sampling_params"]["custom_params"] = {"sparrow": {"report": True}}
    start = time.monotonic()
    answers = connect(url).generate(requests)
    seconds = time.monotonic() - start
    metas = [answer["meta_info"] for answer in answers]
    decode = partial(response_text, tokenizer)
    finished = [
        continued(rollout, answer, sampling, meta["weight_version"], "", decode)
        for rollout, answer, meta in zip(rollouts, answers, metas, strict=True)
    ]
    row = {"seconds": seconds, "truncated": np.mean([each.truncated for each in finished])}
    row["response_tokens"] = np.mean([len(each.response_ids) for each in finished])
    reports = [meta["sparrow"]["kv_tokens_read_mean"] for meta in metas if "sparrow" in meta]
    if read := [tokens for tokens in reports if tokens is not None]:
        row["kv_tokens_read"] = np.mean(read)
    rest = iter(finished)
    groups = [Group(group.prompt, tuple(next(rest) for _ in group.rollouts)) for group in begun]
    return groups, {key: round(float(value), 3) for key, value in row.items()}


def pass_shares(groups: Sequence[Group], config: TrainConfig, pool: RewardPool) -> dict[str, float]:
    """The share of answers that pass, by prompt; without prompts whose rewards are all missing."""
    shares = {}
    for group, rewards in zip(groups, pool.score(groups).rewards, strict=True):
        if (known := known_rewards(rewards)).size:
            key = hashlib.sha256(repr(group.prompt.input_ids).encode()).hexdigest()[:16]
            shares[key] = float((known >= config.evaluation.pass_reward).mean())
    return shares


def summary(row: Row) -> str:
    result = row["compared"]
    low, high, left, right = *result["pass_rate_interval"], *result["difference_interval"]
    read = f", {row['kv_tokens_read']:,.0f} KV tokens" if "kv_tokens_read" in row else ""
    return (
        f"{row['set']} {row['name']}: {result['pass_rate']:.3f} [{low:.3f}, {high:.3f}] of"
        f" {result['prompts']} prompts; difference {result['difference']:+.3f} [{left:+.3f},"
        f" {right:+.3f}], {result['better']} better, {result['worse']} worse,"
        f" p {result['p_value']:.3f}{read}, {row['seconds']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("url")
    parser.add_argument("--schedules", nargs="+", help='names, .json files, fixed-N or "dense"')
    parser.add_argument("--name", default="as served", help="of the row without --schedules")
    parser.add_argument("--out", type=Path, default=Path("answers.json"))
    args = parser.parse_args()
    config = TrainConfig.load(args.config)
    tokenizer = AutoTokenizer.from_pretrained(model_folder(config.model.path))
    task = load_task(config.task, ChatRender(tokenizer, **config.task.chat_template_kwargs))
    sets = task.heldout if isinstance(task.heldout, Mapping) else {"": task.heldout}
    if not all(sets.values()):
        raise InputError("task.heldout_path=None: expected prompts to compare answers to")
    earlier = read_object(args.out, "rows of earlier calls") if args.out.exists() else {"rows": []}
    rows: list[Row] = earlier["rows"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        pool = stack.enter_context(RewardPool(task.reward, config.task.reward_workers))
        if args.schedules:
            stack.callback(set_schedule, args.url, get_schedule(args.url))
        for schedule in args.schedules or [None]:
            if schedule:
                set_schedule(args.url, schedule)
            for name, prompts in sets.items():
                chosen, report = prompts[: config.evaluation.prompts or None], bool(schedule)
                groups, row = generate_answers(args.url, chosen, config, tokenizer, report)
                row |= {"set": name, "name": schedule or args.name}
                row["passed"] = pass_shares(groups, config, pool)
                first = next((each for each in rows if each["set"] == name), row)
                row["compared"] = compared(first, row)
                rows.append(row)
                print(summary(row), flush=True)
                write_json(args.out, provenance() | {"rows": rows})


if __name__ == "__main__":  # reward workers import this file
    try:
        main()
    except SparrowError as error:
        raise SystemExit(str(error)) from None
