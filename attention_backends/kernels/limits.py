"""What the kernels are built for. Imports nothing: servers are refused by the same numbers."""

PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 80, 96, 128, 256)
"""Tiles of 80 and 96 columns are padded to 128."""
MAX_GROUP = 16
"""A group of query heads is one operand of the tensor cores, whose smallest M is 16."""
MAX_PAGES = 32767
"""The compaction of selected pages packs two page counts into one int32, 15 bits for the upper."""
INT4_LANDMARKS = (1, 2, 4, 8)
"""int4 landmarks of a page: a tile holds whole pages."""
PAIRS_MULTIPLE = 8
"""Lines of int4 codes start at multiples of 8 bytes."""
FP8_CAPABILITY = (8, 9)
"""Triton reads float8_e4m3fn from this compute capability on."""
