"""Embed a data set into Parquet files, build an index from them, search it."""
