"""The demo: Megatron's training loop loses processes and nodes and ends as if nothing had been."""
