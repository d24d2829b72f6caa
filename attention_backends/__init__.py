"""The `sparrow` attention backend: dense prefill, sparse decode over selected KV pages."""
