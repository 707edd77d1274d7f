"""`kvreuse bench precision`: what each stored form of KV costs in bytes and in answers, in this process.

For many prompts the prefix is computed once; its blocks are packed, unpacked and put elsewhere, and the rest of the
prompt is computed on them. The next-token logits are compared with those on the exact KV. Knows nothing of tiers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvreuse.config import Config, set_torch_defaults
from kvreuse.ops.bench.decode import make_items, scheduled
from kvreuse.ops.bench.numbers import at_least
from kvreuse.ops.bench.report import Report, environment
from kvreuse.ops.bench.workload import Workload, load_tokenizer

if TYPE_CHECKING:
    from kvreuse.engine.parts import EngineParts
    from kvreuse.engine.scheduler import Scheduled
    from kvreuse.kv.codec import BlockCodec

__all__ = ["add_flags", "measure"]

_PREFIX, _OWN = 96, 24


@dataclass(slots=True)
class _Score:
    num_bytes: int = 0
    num_agreeing: int = 0
    max_difference: float = 0.0
    num_raw: int = 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this measurement."""
    parser.add_argument("--prompts", type=at_least(1), default=200, metavar="N", help="prompts to compare")
    parser.add_argument("--group-size", type=at_least(8), default=64, metavar="N", help="values that share a scale")
    parser.add_argument("--model", default="demo", help="model to run: demo or a folder")


def measure(args: argparse.Namespace) -> Report:
    """Top-1 agreement, largest logit difference and bytes of every form, against exact KV. Raises ConfigError."""
    set_torch_defaults()
    from kvreuse.engine.parts import build
    from kvreuse.kv.codec import ENCODINGS, BlockCodec

    parts = build(Config(model_id=args.model, kv_cache_memory_bytes=2**30))
    codec = BlockCodec(parts.pool.layout, block_size=parts.cache.block_size, group_size=args.group_size)
    workload = Workload(load_tokenizer(args.model), prefix_tokens=_PREFIX, own_tokens=_OWN, seed=0, marker="")
    scores = {encoding: _Score() for encoding in ENCODINGS}
    num_templates = max(4, args.prompts // 4)
    for number in range(args.prompts):
        ids = list(parts.tokenizer.encode(workload.variant(number % num_templates)))
        _compare(parts, codec, ids, scores)
    bf16_bytes = scores["bf16"].num_bytes
    figures: dict[str, object] = {"prompts": args.prompts, "group_size": args.group_size}
    rows = [f"{'form':<8}{'bytes / bf16':>14}{'top-1 agreement':>18}{'largest logit difference':>27}{'left raw':>10}"]
    for encoding, score in scores.items():
        share, agreement = score.num_bytes / bf16_bytes, score.num_agreeing / args.prompts
        figures[encoding] = {
            "bytes_share_of_bf16": round(share, 4),
            "top1_agreement": round(agreement, 4),
            "max_logit_difference": round(score.max_difference, 4),
            "num_blocks_left_raw": score.num_raw,
        }
        rows.append(f"{encoding:<8}{share:>14.3f}{agreement:>18.1%}{score.max_difference:>27.3f}{score.num_raw:>10}")
    return Report(figures={**figures, "environment": environment()}, table="\n".join(rows))


def _compare(parts: EngineParts, codec: BlockCodec, ids: list[int], scores: dict[str, _Score]) -> None:
    size = parts.cache.block_size
    num_prefix = _PREFIX // size * size
    [exact] = make_items(parts, [ids], reuse=False)
    parts.runner.run([scheduled(exact, num_prefix)])
    exact.sequence.num_computed_tokens = num_prefix
    payloads = [codec.read(parts.pool, exact.lease.slot(position)) for position in range(0, num_prefix, size)]
    reference = _rest(parts, exact)
    for encoding, score in scores.items():
        [item] = make_items(parts, [ids], reuse=False)
        for number, payload in enumerate(payloads):
            packed, used = codec.pack(payload, encoding)
            score.num_bytes += packed.numel()
            score.num_raw += used != encoding
            codec.write(parts.pool, item.lease.slot(number * size), codec.unpack(packed, used))
        item.sequence.num_computed_tokens = num_prefix
        logits = _rest(parts, item)
        score.num_agreeing += int(logits.argmax() == reference.argmax())
        score.max_difference = max(score.max_difference, float((logits - reference).abs().max()))
        parts.cache.release(item.lease)
    parts.cache.release(exact.lease)


def _rest(parts: EngineParts, item: Scheduled) -> Any:
    """Next-token logits (vocabulary,) after the rest of the prompt."""
    _, logits = parts.runner.run([scheduled(item, item.sequence.num_uncomputed_tokens)])
    return logits[0]
