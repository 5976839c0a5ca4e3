"""PLACEHOLDER, to be replaced: the command ``doctor``."""


def doctor() -> None:
    """Not written yet."""
