"""Programs for a machine with a GPU, one for each question, started by the script beside each."""
