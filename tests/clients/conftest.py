"""Clients also meet the server over a fake engine, where a fault can be ordered."""

from __future__ import annotations

from server.conftest import make_site, site

__all__ = ["make_site", "site"]
