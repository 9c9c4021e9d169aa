"""Benchmarks of megatron-ft; `python -m benchmarks`."""
