"""``truedraft top``: what a running server does now, in a terminal. Reads the endpoints of the page at /ui."""
