"""Names of earlier pre-releases that files still hold, and what they are called today.

Old names are read until 0.2: with a notice in a configuration, without one in the files that a run
has written.
"""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

RENAMED = {
    "optimiser": "optimizer",
    "actor/optimiser_steps": "actor/optimizer_steps",
    "sparrow/kv_tokens_held": "sparrow/kv_tokens_cached",
}


def current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the keys of today; keys of nested mappings are not changed."""
    return {RENAMED.get(key, key): value for key, value in values.items()}


def accept_renamed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """`current_names` of a configuration, with one line of notice for each old name.

    Raises `ValueError` if both names of a section are there.
    """
    for old in RENAMED.keys() & sections.keys():
        new = RENAMED[old]
        if new in sections:
            raise ValueError(f"[{old}] and [{new}] are one section: keep [{new}] alone")
        logger.warning("[%s] is called [%s] now; the old name ends with 0.2", old, new)
    return current_names(sections)
