"""Tests of megatron-ft: see CONTRIBUTING.md for what is in which folder."""
