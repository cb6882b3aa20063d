"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("truedraft")
except PackageNotFoundError:  # run from a folder that was never installed
    VERSION = "0.0.0"
