"""``python -m bench.speculation``: what each drafter and the controller gain or cost (docs/speculation.md)."""
