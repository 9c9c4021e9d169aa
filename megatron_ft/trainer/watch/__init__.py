"""What a trainer reports of itself: heartbeats, iteration times, parts of its start."""
