"""The supervisor of a job: its SMPs, incarnations, snapshots, recovery, drains."""
