"""Writes the bill of materials of an image (CycloneDX JSON) to stdout: `sbom.py LOCK...`.

Knows lock files with hashes. Says the same for the same locks, so it names neither a time nor a serial number. Of the
files that a lock allows for a package it names the hash only where there is one: which of several was taken is unknown.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PACKAGE = re.compile(r"^([\w.-]+)==([\w.+!-]+)((?:[ \\\n]+--hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)


def components(text: str) -> dict[str, dict[str, object]]:
    """CycloneDX components of one lock, by package URL."""
    found: dict[str, dict[str, object]] = {}
    for name, version, tail in PACKAGE.findall(text):
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version.replace('+', '%2B')}"
        component: dict[str, object] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        }
        hashes = re.findall(r"sha256:(\w+)", tail)
        if len(hashes) == 1:
            component["hashes"] = [{"alg": "SHA-256", "content": hashes[0]}]
        found[purl] = component
    return found


def main(paths: list[str]) -> None:
    found: dict[str, dict[str, object]] = {}
    for path in paths:
        found |= components(Path(path).read_text(encoding="utf-8"))
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "kvreuse"}},
        "components": [found[purl] for purl in sorted(found)],
    }
    json.dump(bom, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(sys.argv[1:])
