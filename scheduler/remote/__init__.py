"""An engine in another process: the messages, the side that the server sees, and the side that hosts the engine."""
