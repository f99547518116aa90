"""An index of a collection: embed it, build it, search it."""
