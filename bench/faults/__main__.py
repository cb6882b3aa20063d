"""``python -m bench.faults serve ...``: ``truedraft serve`` with faults on command; see bench.faults.control."""

from __future__ import annotations

from bench.engine_here import with_engine_here
from server.cli import main, report, serve
from server.settings import Settings


def serve_with_faults(settings: Settings) -> int:
    """Returns the exit code. Raises SettingsError for an engine whose parts are out of reach."""
    settings = with_engine_here(settings, "the parts that are to fail would be in the other process")
    # Imported here: torch takes seconds, and --help or a bad flag should not.
    from bench.faults.control import PATH, FaultsEndpoint
    from bench.faults.faults import Faults
    from bench.faults.parts import faulty_parts
    from server.app import create_app

    faults = Faults()
    report(f"this server fails on command: POST {PATH}")
    return serve(settings, faulty_parts(faults), lambda service: FaultsEndpoint(create_app(service), faults))


if __name__ == "__main__":
    raise SystemExit(main(serve_settings=serve_with_faults))
