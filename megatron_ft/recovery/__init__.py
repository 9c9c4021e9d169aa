"""From what survived to a running job: inventory, decision, rebuild, restore."""
