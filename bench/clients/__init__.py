"""Other people's clients against a Truedraft server, each a program of its own: see docs/clients.md."""
