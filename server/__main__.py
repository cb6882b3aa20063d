"""``python -m server`` is ``truedraft``."""

from server.cli import main

raise SystemExit(main())
