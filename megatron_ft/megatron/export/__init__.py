"""Snapshots as Megatron's own checkpoints, made without trainers, model or GPU."""
