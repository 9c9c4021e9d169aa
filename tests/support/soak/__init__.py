"""A soak: one job, many snapshots, random faults, and nothing that grows."""
