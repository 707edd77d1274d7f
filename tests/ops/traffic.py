"""Made-up traffic for the planning tools: templates with variants, conversations, and a file of either."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvreuse.ops.trace import Trace, read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE = DATA / "traces" / "mooncake_conversation_trace.jsonl.gz"
BLOCK = 32


def write_templates(
    path: Path, *, num_templates: int = 40, num_requests: int = 600, shared: int = 20, own: int = 4, gap_ms: int = 50
) -> None:
    """Requests of `shared` common and `own` private blocks, templates drawn evenly, one every `gap_ms`."""
    chance, fresh = random.Random(0), iter(range(10**6, 10**9))
    with path.open("w", encoding="utf-8") as out:
        for number in range(num_requests):
            template = chance.randrange(num_templates)
            ids = [template * 1000 + i for i in range(shared)] + [next(fresh) for _ in range(own)]
            record = {
                "timestamp": number * gap_ms,
                "input_length": len(ids) * BLOCK,
                "output_length": 8,
                "hash_ids": ids,
            }
            out.write(json.dumps(record) + "\n")


def templates(folder: Path, **shape: int) -> Trace:
    path = folder / "trace.jsonl"
    write_templates(path, **shape)
    return read_trace(str(path))
