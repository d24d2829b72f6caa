"""The rules by which a sparse layer chooses its pages. `attention_backends.reference` defines them
in torch."""

from typing import Final, Literal, get_args

SelectionRule = Literal["published", "int4"]
"""`PUBLISHED`: a page has one landmark, the mean of its keys in the dtype of the KV cache, scored
by the mean query of a KV head's group. `INT4`: a landmark is the mean of `int4_landmark_tokens`,
stored as int4 codes with an fp16 scale; a page scores as its best landmark does with any query of
the group."""

PUBLISHED: Final = "published"
INT4: Final = "int4"
RULES: tuple[SelectionRule, ...] = get_args(SelectionRule)

_MOST_LANDMARKS = 8
_SCALE_BYTES = 2


def int4_landmark_tokens(page_size: int) -> int:
    """Tokens of an int4 landmark: four, or more where a page would have more than eight."""
    # Landmarks of two tokens rank pages better, but a step reads twice as many.
    return max(4, page_size // _MOST_LANDMARKS)


def landmark_bytes(rule: SelectionRule, page_size: int, head_dim: int, mean_itemsize: int) -> int:
    """Bytes of the landmarks of one page and KV head; a number of a landmark that is not int4 takes
    `mean_itemsize` bytes."""
    if rule == INT4:
        return page_size // int4_landmark_tokens(page_size) * (head_dim // 2 + _SCALE_BYTES)
    return head_dim * mean_itemsize
