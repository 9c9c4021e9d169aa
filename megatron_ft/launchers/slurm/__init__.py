"""Processes in an allocation of Slurm."""
