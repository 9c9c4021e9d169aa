"""The demo: a small training program, its faults, its report."""
