"""What the GPU kernels are built for, in plain numbers; the CPU path has no such limits.

`attention_backends.kernels` checks its arguments against them, and a server is refused by them
before it loads a model.
"""

# Tiles of 80 and 96 columns are padded to 128.
HEAD_DIMS = (64, 80, 96, 128, 256)
# A group of query heads is one operand of the tensor cores, whose smallest M is 16.
MAX_GROUP = 16
# The compaction of selected pages packs two page counts into one int32, 15 bits for the upper one.
MAX_PAGES = 32767
# What FlashInfer's prefill computes rightly, of HEAD_DIMS. It takes 80 and 96 without a word, but
# loads 64 columns at a time and leaves the others out (github.com/flashinfer-ai/flashinfer, 4299).
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def dense_backend(head_dim: int) -> str:
    """SGLang's attention backend for dense passes on a GPU."""
    return "flashinfer" if head_dim in FLASHINFER_HEAD_DIMS else "triton"


def max_context(page_size: int) -> int:
    """Longest sequence that the kernels address, in tokens."""
    return MAX_PAGES * page_size
