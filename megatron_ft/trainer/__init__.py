"""Runs inside the training process: SnapshotManager, capture, restore, heartbeats."""
