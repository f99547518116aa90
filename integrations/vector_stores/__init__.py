"""Vector stores that ``coder-plugin export`` writes to: one file each, and what they share."""
