"""Faults on purpose: a server whose parts raise or hang on command. Nothing of it is in a server that does not ask."""
