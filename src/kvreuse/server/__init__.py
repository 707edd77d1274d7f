"""The one-process HTTP server, its toolkit adapter, its start and its end."""
