"""The wire: command line, settings, HTTP application, streaming, metrics."""
