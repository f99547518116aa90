"""The one exception that a person is meant to read."""


class CoderError(ValueError):
    """Something a user can put right: says what was wrong and what is allowed. The command line prints it in one line."""
