"""What one snapshot costs in messages and bytes as nodes grow: counted, and by a model."""
