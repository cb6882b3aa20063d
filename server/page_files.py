"""Files of a web page: read once, held in memory, served as what they are and under the page's own policy."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

KEYS_MARK = b'data-keys="no"'  # in a page: whether it has to ask for a key before anything else
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    media_type: str
    etag: str


def read_page_file(path: Traversable, *, keys: bool) -> PageFile:
    """``keys``: the server has API keys, which a page that says so asks for. The name has an ending of MEDIA_TYPES."""
    body = path.read_bytes()
    ending = suffix(path)
    if keys and ending == ".html":
        body = body.replace(KEYS_MARK, b'data-keys="yes"', 1)
    return PageFile(body, MEDIA_TYPES[ending], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def suffix(path: Traversable) -> str:
    """The ending of its name, with the dot."""
    _, dot, ending = path.name.rpartition(".")
    return dot + ending


def page_headers(policy: str) -> dict[str, str]:
    """Of every file of a page; ``policy`` is its Content-Security-Policy."""
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # asked for again each time, so a page is never older than its server
    }


def page_router(page: str, files: Mapping[str, PageFile], policy: str) -> APIRouter:
    """Serves ``files`` by their paths, of which ``page`` is one, and leads ``page`` with a slash behind it there."""
    router = APIRouter(include_in_schema=False)
    headers = page_headers(policy)
    for path, file in files.items():
        router.add_api_route(path, _serving(file, headers), methods=["GET", "HEAD"], response_model=None)

    @router.get(f"{page}/")
    async def leads_to_the_page() -> Response:
        return RedirectResponse(f"..{page}", headers=headers)  # relative: a proxy may serve us below a path of its own

    return router


def page_paths(page: str, files: Mapping[str, PageFile]) -> frozenset[str]:
    """What ``page_router`` answers, none of which holds data."""
    return frozenset({*files, f"{page}/"})


def _serving(file: PageFile, headers: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    with_etag = {**headers, "ETag": file.etag}

    async def serve(request: Request) -> Response:
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=with_etag)
        return Response(file.body, media_type=file.media_type, headers=with_etag)

    return serve
