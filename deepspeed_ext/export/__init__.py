"""DeepSpeed's own checkpoints from snapshots, without the trainers."""
