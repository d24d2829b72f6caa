"""The Grafana dashboard asks for what a server with an audit really exports."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
from engines import random_prompt
from servers import exported
from waiting import wait_until

DASHBOARD = Path(__file__).parents[2] / "examples" / "openai_server" / "grafana.json"
# Labels that Prometheus adds when it scrapes.
SCRAPED_LABELS = {"instance"}


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return content


def queries() -> list[str]:
    """PromQL of every panel, and of the variables."""
    content = dashboard()
    panels = [target["expr"] for panel in content["panels"] for target in panel["targets"]]
    variables = content["templating"]["list"]
    return panels + [each["definition"] for each in variables if "definition" in each]


def test_every_metric_and_label_is_exported(client: httpx.Client) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
    body = {"input_ids": random_prompt(1, 100), "sampling_params": sampling}

    def is_scored() -> bool:
        # A request is dropped while four others are recorded or wait for their score.
        client.post("/generate", json=body)
        return "sparrow:acceptance_tail" in exported(client.base_url)

    wait_until(is_scored)
    found = exported(client.base_url)
    selectors = [
        (f"{prefix}:{name}", labels)
        for query in queries()
        for prefix, name, labels in re.findall(
            r'{__name__=~"(sparrow|sglang)\[:_](\w+)"([^}]*)}', query
        )
    ]
    # A lossless server exports what it drafts.
    selectors = [(name, labels) for name, labels in selectors if "draft" not in name]
    names = {name for name, _ in selectors}
    # All our metrics are on the dashboard, and it asks for no metric that is not exported.
    assert {name for name in found if name.startswith("sparrow:")} <= names
    assert names <= found.keys()
    for name, labels in selectors:
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', labels):
            if label not in SCRAPED_LABELS:
                assert value in found[name][label], (name, label)
    for query in queries():
        for label, name in re.findall(r'by \((\w+)\) \([^{]*{__name__=~"(\w+\[:_]\w+)"', query):
            if label != "kind":
                assert label in found[name.replace("[:_]", ":")], query
