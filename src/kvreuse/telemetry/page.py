"""Pages for people: one file each, with style and charts put in, so that they need nothing else.

Knows the files beside it. Knows nothing of what a page shows.
"""

from __future__ import annotations

import json
from importlib.resources import files

__all__ = ["render"]


def render(name: str, data: object = None) -> str:
    """Page `name` of the folder `pages`. `data` is what its script finds as DATA."""
    folder = files("kvreuse.telemetry") / "pages"
    text = (folder / name).read_text(encoding="utf-8")
    for part in ("style.css", "charts.js"):
        text = text.replace(f"/* {part} */", (folder / part).read_text(encoding="utf-8"))
    # "<" would end the script early if a name held a tag.
    return text.replace("/* data */ null", json.dumps(data).replace("<", "\\u003c"))
