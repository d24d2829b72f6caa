"""The stability study's task and an engine: what the engine returns is what the task reads."""

from pathlib import Path

import graph_walk
import pretraining
import torch
from engines import import_for_fork
from stability_study import task_of, tiny


def test_the_engine_gives_back_the_words_that_are_rewarded(tmp_path: Path) -> None:
    import_for_fork()
    from sparrow_sglang.rl.engines.local_engine import LocalEngine
    from sparrow_sglang.rl.rollout import Sampling

    settings = tiny()
    task, tokenizer = task_of(settings.walk)
    torch.manual_seed(0)
    model = pretraining.new_model(settings, tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = LocalEngine(str(tmp_path), "fixed-64", random_seed=0, **settings.server_args)
    try:
        engine.update_weights(model.named_parameters(), "1")
        sampling = Sampling(settings.walk.response_tokens())
        groups = engine.generate(task.train[:4], 2, sampling)
    finally:
        engine.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        words = tokenizer.convert_ids_to_tokens(rollout.response_ids)
        assert rollout.text.split() == [word for word in words if word != graph_walk.STOP]
    # A random model stops now and then; that must end a response before its limit.
    assert any(rollout.finish_reason == "stop" for rollout in rollouts)
