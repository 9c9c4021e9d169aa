"""The random campaign: long jobs, each of which suffers one random fault after another."""
