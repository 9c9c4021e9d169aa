"""Shared by every other package: ids, errors, layout tables, /proc, small objects."""
