"""Measures the time from a fault to the next iteration, by framework and of torchrun."""
