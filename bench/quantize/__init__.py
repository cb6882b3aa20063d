"""What int8 weights cost in quality and bring in speed, against the same model in its own precision."""
