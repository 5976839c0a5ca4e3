"""The host's part of a model that lives on a GPU: what comes down from it and goes up to it."""
