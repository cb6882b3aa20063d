"""The page at /ui: files that hold no data and need no key. What the page shows it asks for with the reader's key."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from server.page_files import MEDIA_TYPES, PageFile, page_paths, page_router, read_page_file

PAGE = "/ui"
STATIC = Path(__file__).parent / "static"

_INDEX = "index.html"
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


def load_shell(*, keys: bool) -> dict[str, PageFile]:
    """The page's files by the paths that serve them. ``keys``: the server has API keys, so the page asks for one."""
    return {
        PAGE if path.name == _INDEX else f"{PAGE}/{path.name}": read_page_file(path, keys=keys)
        for path in sorted(STATIC.iterdir())
        if path.suffix in MEDIA_TYPES  # what an editor left there is no part of the page, and no reason to fail
    }


def shell_router(files: dict[str, PageFile]) -> APIRouter:
    """Serves ``files``, and leads ``/ui/`` to the page."""
    return page_router(PAGE, files, CONTENT_SECURITY_POLICY)


def open_paths(files: dict[str, PageFile]) -> frozenset[str]:
    """What is answered without a key."""
    return page_paths(PAGE, files)
