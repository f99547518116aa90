"""Models built, opened, encoded with and exported."""
