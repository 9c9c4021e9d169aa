"""The report of a job: one HTML file without scripts, made from its recorded events."""
