"""Fault injection: faults at named points of a job on a virtual cluster, and a judge."""
