"""What all exporters share: a snapshot becomes a checkpoint of the training framework's own."""
