"""Candidates on the user's own pictures, each at its best rate, with intervals: ``coder-plugin compare``."""
