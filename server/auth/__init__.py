"""Who may use the server: API keys, and the middleware that asks for them."""
