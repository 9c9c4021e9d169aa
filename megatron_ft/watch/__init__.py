"""Watching training from outside: progress, hangs, stragglers, and the parts of a restart."""
