"""Lossless decoding: sparse decode steps draft tokens, one dense pass verifies them."""
