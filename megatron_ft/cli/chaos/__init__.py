"""Fault injection at named points, and the judge of what the job did."""
