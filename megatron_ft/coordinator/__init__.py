"""The one process that permits, commits and aborts snapshots, and leads recoveries."""
