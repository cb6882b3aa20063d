"""Modules of child processes: the functions of the server's own, and one that suffers a fault."""
