"""How long the server's event loop stands still while clients ask for as much as they can: see docs/event_loop.md."""
