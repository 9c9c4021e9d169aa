"""Jobs on nodes with an agent each: a process that starts, watches and ends others there."""
