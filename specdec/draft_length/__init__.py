"""How many drafts a step verifies: what it costs, what it brings, what is best."""
