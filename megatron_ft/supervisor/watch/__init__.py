"""Finds hangs and stragglers from heartbeats, and times recoveries."""
