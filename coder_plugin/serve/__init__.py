"""Search in a browser: a page and a JSON API over an index, on one port (``coder-plugin serve``)."""
