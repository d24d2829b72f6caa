"""Shipped budget schedules: data with provenance, loaded by `sparrow_sglang.schedule`."""
