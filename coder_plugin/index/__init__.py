"""Embed a collection into an index on disk, and search it."""
