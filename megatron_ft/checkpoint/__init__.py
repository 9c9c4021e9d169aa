"""Snapshots on disk and exports: drain, read, keep, and the frameworks' own formats."""
