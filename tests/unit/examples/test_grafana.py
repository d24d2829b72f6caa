"""The panels of the Grafana dashboard fit together."""

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[3] / "examples" / "openai_server" / "grafana.json"


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return content


def test_panels_do_not_overlap_and_use_the_chosen_server() -> None:
    content = dashboard()
    places = set()
    for panel in content["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & places, panel["title"]
        places |= cells
        assert panel["datasource"]["uid"] == "${datasource}" and panel["description"]
        for target in panel["targets"]:
            if target["expr"] == "vector($target)":
                continue
            # Under the names that stores give which allow no colon, too.
            metrics = re.findall(r'{__name__=~"(?:sparrow|sglang)\[:_]\w+",', target["expr"])
            assert len(metrics) == target["expr"].count("{") > 0
            assert target["expr"].count(',instance=~"$instance"') == len(metrics)
    assert len({panel["id"] for panel in content["panels"]}) == len(content["panels"])
