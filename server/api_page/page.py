"""The files of /docs: ours, and Swagger UI's own out of the package that carries them. They hold no data."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from server.page_files import PageFile, read_page_file

DOCS = "/docs"
STATIC = Path(__file__).parent / "static"
# fastapi-swagger carries what Swagger UI publishes, unchanged. Its own routes, with a script in the page, are not used.
SWAGGER_UI = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")

# As /ui's, but for what Swagger UI needs: it styles elements in their markup, and makes pictures of markup.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


def load_docs(*, keys: bool) -> dict[str, PageFile]:
    """By the paths that serve them. ``keys``: the server has API keys, so the page asks for one."""
    carried = files("fastapi_swagger") / "resources"
    found = {f"{DOCS}/{name}": read_page_file(carried / name, keys=keys) for name in SWAGGER_UI}
    found |= {f"{DOCS}/{name}": read_page_file(STATIC / name, keys=keys) for name in ("page.js", "page.css")}
    return {DOCS: read_page_file(STATIC / "index.html", keys=keys), **found}
