"""Start and stop processes on nodes, and decide nothing."""
