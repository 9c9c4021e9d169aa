"""How long training stands after a fault, by framework, and beside torchrun's own restart."""
