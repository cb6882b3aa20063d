"""The chaos soak: a real server under everything that clients do, and what must hold when they are gone."""
