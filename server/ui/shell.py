"""The page at /ui: files that hold no data and need no key. What the page shows it asks for with the reader's key."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

PAGE = "/ui"
STATIC = Path(__file__).parent / "static"

_INDEX = "index.html"
_KEYS_MARK = b'data-keys="no"'  # in the index: whether the page has to ask for a key before anything else
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no markup out of strings, in nobody's frame.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, so a page is never older than its server
}


@dataclass(frozen=True, slots=True)
class ShellFile:
    body: bytes
    media_type: str
    etag: str


def load_shell(*, keys: bool) -> dict[str, ShellFile]:
    """The page's files by the paths that serve them. ``keys``: the server has API keys, so the page asks for one."""
    files: dict[str, ShellFile] = {}
    for path in sorted(STATIC.iterdir()):
        if path.suffix not in _MEDIA_TYPES:  # what an editor left there is no part of the page, and no reason to fail
            continue
        body = path.read_bytes()
        if path.name == _INDEX and keys:
            body = body.replace(_KEYS_MARK, b'data-keys="yes"', 1)
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        where = PAGE if path.name == _INDEX else f"{PAGE}/{path.name}"
        files[where] = ShellFile(body, _MEDIA_TYPES[path.suffix], etag)
    return files


def shell_router(files: dict[str, ShellFile]) -> APIRouter:
    """Serves ``files``, and leads ``/ui/`` to the page."""
    router = APIRouter(include_in_schema=False)
    for path, file in files.items():
        router.add_api_route(path, _serving(file), methods=["GET", "HEAD"], response_model=None)

    @router.get(f"{PAGE}/")
    async def leads_to_the_page() -> Response:
        return RedirectResponse("../ui", headers=_HEADERS)  # relative: a proxy may serve us below a path of its own

    return router


def open_paths(files: dict[str, ShellFile]) -> frozenset[str]:
    """What is answered without a key."""
    return frozenset({*files, f"{PAGE}/"})


def _serving(file: ShellFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def serve(request: Request) -> Response:
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.body, media_type=file.media_type, headers=headers)

    return serve
