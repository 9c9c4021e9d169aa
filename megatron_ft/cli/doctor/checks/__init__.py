"""What facts mean: each function takes all Facts and returns findings.  Pure, all of it."""
