"""Jobs inside a Slurm allocation: every process that we start is a job step of its own."""
