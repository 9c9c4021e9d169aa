"""The trainer's side: what is captured, how it is copied, and how it comes back."""
