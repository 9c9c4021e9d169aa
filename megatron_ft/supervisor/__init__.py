"""The supervisor of a job: incarnations, the coordinator, recovery, drains."""
