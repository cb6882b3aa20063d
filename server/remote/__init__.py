"""The engine in a process of its own: starting it, what runs in it, and what the server has of it."""
