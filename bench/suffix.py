"""Time to first token of a hit, against a bare Transformers forward of the same suffix on the same cached prefix.

    python -m bench.suffix --dtype float32 --json suffix.json

Both in turn, so that whatever else the machine does meets both. The bare forward is the floor: no HTTP, no tokenizer,
no scheduler, no sampling but the largest logit.
Knows a server and a model. Knows nothing of tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

from bench.peers.load import ask
from bench.peers.process import interrupted_by_sigterm, running
from bench.peers.roster import MODEL, PEERS, ROOT, Launch, environment
from kvreuse.ops.bench.server import free_port
from kvreuse.ops.bench.workload import Workload, load_tokenizer

__all__ = ["main"]

_PREFIX_TOKENS = 1024
_OWN_TOKENS = 32


class BareForward:
    """A model with the KV of one prefix."""

    def __init__(self, prefix_ids: list[int], *, dtype: str, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, DynamicCache

        torch.set_num_threads(num_threads)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype)).eval()
        self._cache = DynamicCache(config=self._model.config)
        self._forward(prefix_ids)

    def time_s(self, own_ids: list[int]) -> float:
        """Seconds to the next token id behind the prefix and `own_ids`."""
        began_at = time.perf_counter()
        self._forward(own_ids)
        took_s = time.perf_counter() - began_at
        self._cache.crop(-len(own_ids))
        return took_s

    def _forward(self, ids: list[int]) -> int:
        with self._torch.inference_mode():
            output = self._model(input_ids=self._torch.tensor([ids]), cache=self._cache, logits_to_keep=1)
            return int(output.logits[0, -1].argmax())


def measure(*, dtype: str, num_threads: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of every round, and the medians. The first round of both warms up."""
    tokenizer = load_tokenizer(str(MODEL))
    workload = Workload(tokenizer, prefix_tokens=_PREFIX_TOKENS, own_tokens=_OWN_TOKENS)
    bare = BareForward(_ids(tokenizer, workload.prefix(0)), dtype=dtype, num_threads=num_threads)
    kvreuse, port = PEERS["kvreuse"], free_port()
    launch = Launch(dtype=dtype, num_threads=num_threads, concurrency=1, port=port)
    url = f"http://127.0.0.1:{port}"
    hit_s: list[float] = []
    bare_s: list[float] = []
    variables = environment(kvreuse, num_threads)
    with running(kvreuse.command(launch), health=url + kvreuse.health, environment=variables, cwd=ROOT):
        ask(url, workload.variant(0), max_tokens=2)
        for _ in range(num_rounds + 1):
            prompt = workload.variant(0)
            hit_s.append(ask(url, prompt, max_tokens=2).ttft_s)
            bare_s.append(bare.time_s(_ids(tokenizer, prompt)[_PREFIX_TOKENS:]))
    return {
        "dtype": dtype,
        "prefix_tokens": _PREFIX_TOKENS,
        "own_tokens": _OWN_TOKENS,
        "hit_ttft_s": hit_s[1:],
        "bare_forward_s": bare_s[1:],
        "ratio": median(hit_s[1:]) / median(bare_s[1:]),
    }


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def main(argv: list[str] | None = None) -> int:
    """0 when it was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of both")
    parser.add_argument("--rounds", type=int, default=20, help="hits and bare forwards, in turn")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    figures = measure(dtype=args.dtype, num_threads=args.threads, num_rounds=3 if args.quick else args.rounds)
    args.json.write_text(json.dumps(figures, indent=1))
    print(f"a hit takes {figures['ratio']:.2f} times a bare forward", file=sys.stderr)
    return 0


if __name__ == "__main__":
    interrupted_by_sigterm()
    sys.exit(main())
