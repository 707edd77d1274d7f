"""Which KV is which: a name for everything that decides what the keys and values of given token ids are.

Two servers may use each other's stored KV when these names are equal, and only then. Knows checkpoint folders and their
bytes. Knows nothing of where KV is stored.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from io import FileIO
from pathlib import Path
from typing import Any

from xxhash import xxh3_128, xxh3_128_hexdigest

from kvreuse.config import Config, user_cache_dir
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout

__all__ = ["adapter_digest", "checkpoint_folder", "kv_namespace", "model_digest", "why_not_shared"]

# Raise it when a payload's layout changes, or when the same model computes other numbers than before.
LAYOUT_VERSION = 1
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself allows
_CHUNK_BYTES = 2**20
_RACY_S = 2.0  # a file this young could change again without another time stamp
_TEXTS = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}  # config, tokenizer, template, the model's own code
_NOT_OF_THE_MODEL = {"generation_config.json"}

# Nothing here takes part in any key or value: the head, the final norm, and the last layer's parts after its K and V.
_AFTER_LAYERS = re.compile(r"(lm_head|embed_out|(model|transformer|gpt_neox)\.(norm|ln_f|final_layer_?norm))\.")
_LAYER = re.compile(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.*)")
_AFTER_KV = re.compile(
    r"(mlp|feed_forward|block_sparse_moe|(self_attn|attention|attn)\.(q_proj|q_norm|o_proj|dense|c_proj|sinks)"
    r"|(post_attention|pre_feedforward|post_feedforward)_layernorm|ln_2)\b"
)
# Of a config, what does not change the keys and values of token ids.
_NAMES_ONLY = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "pad_token_id",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Weights:
    """header: digest of a file's header. tensors: digest of each tensor's name, type, shape and bytes, by name."""

    header: str
    tensors: dict[str, str]


def checkpoint_folder(source: str | Path) -> Path:
    """Where the files of a folder or hub id are. Raises ConfigError when they are not on this machine."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(str(source), "config.json", local_files_only=True))).parent
    except OSError:
        raise ConfigError(f"the files of the model {source} are not found, so its stored KV cannot be named") from None


def kv_namespace(config: Config, *, folder: Path, layout: KVLayout, adapter: Path | None = None) -> str:
    """32 hex digits: equal only where the same tokens have the same stored KV. Raises ConfigError."""
    is_float32 = config.dtype == "auto" and all(device.type == "cpu" for device in layout.devices)
    parts = {
        "layout": LAYOUT_VERSION,
        "model": model_digest(folder, is_shared=config.cross_model_sharing),
        "adapter": adapter_digest(adapter) if adapter else None,
        "layers": [
            (layer.num_kv_heads, layer.key_head_dim, layer.value_head_dim, layer.window, str(layer.dtype))
            for layer in layout.layers
        ],
        "computed_in": "float32" if is_float32 else config.dtype,
        "computed_on": sorted({device.type for device in layout.devices}),
        "computed_by": version("transformers"),  # its releases change rotary schemes and norms
        "max_model_len": config.max_model_len,  # decides between the regimes of some rotary schemes
        "encoding": config.kv_cache_dtype,
        "group_size": config.kv_cache_quant_group_size,
        "block_size": config.kv_cache_block_size,
    }
    return _digest(parts)


def model_digest(folder: Path, *, is_shared: bool = False, cache_dir: Path | None = None) -> str:
    """32 hex digits of weights, config, tokenizer, chat template and code. is_shared: only of what makes KV.

    Weights are read once; later their size, times and inode must be as they were. cache_dir replaces the user's own.
    Raises ConfigError when there are no weights or they cannot be read.
    """
    try:
        weights = {path.name: _weights(path, cache_dir or user_cache_dir()) for path in _safetensors(folder)}
        if is_shared:
            config = _config(folder)
            return _digest([_kv_config(config), sorted(_kv_tensors(weights.values(), config).items())])
        texts = {
            path.name: xxh3_128_hexdigest(path.read_bytes())
            for path in folder.iterdir()
            if path.suffix in _TEXTS and path.name not in _NOT_OF_THE_MODEL and path.is_file()
        }
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"the model in {folder} cannot be read to name its stored KV: {error}") from error
    return _digest([{name: (w.header, w.tensors) for name, w in weights.items()}, texts])


def adapter_digest(folder: Path) -> str:
    """32 hex digits of every byte of an adapter."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _digest([(path.relative_to(folder).as_posix(), xxh3_128_hexdigest(path.read_bytes())) for path in files])


def why_not_shared(folder: Path, other: Path, *, cache_dir: Path | None = None) -> str | None:
    """One sentence on why two models cannot use each other's KV; None when they can (option.cross_model_sharing)."""
    configs = [_config(path) for path in (folder, other)]
    ours, theirs = (
        _kv_tensors([_weights(path, cache_dir or user_cache_dir()) for path in _safetensors(model)], config)
        for model, config in zip((folder, other), configs, strict=True)
    )
    ours_config, theirs_config = map(_kv_config, configs)
    unlike = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    fields = sorted(k for k in ours_config | theirs_config if ours_config.get(k) != theirs_config.get(k))
    if not unlike and not fields:
        return None
    if fields:
        reason = f"their configs differ in {', '.join(fields[:4])}"
    else:
        reason = f"{len(unlike)} of the {len(ours)} tensors that make them differ, first {unlike[0]}"
    return (
        f"{folder.name} and {other.name} do not share KV because {reason}: "
        "their keys and values are different numbers, not merely different shapes"
    )


def _digest(parts: Any) -> str:
    return xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _safetensors(folder: Path) -> list[Path]:
    """Raises ConfigError when there is none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no safetensors, so its stored KV cannot be named")
    return paths


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return config


def _kv_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NAMES_ONLY}


def _kv_tensors(files: Iterable[_Weights], config: dict[str, Any]) -> dict[str, str]:
    """Digests of the tensors that make keys and values; whatever is not known to come after them counts."""
    last = config.get("num_hidden_layers", config.get("n_layer", 0)) - 1

    def makes_kv(name: str) -> bool:
        layer = _LAYER.fullmatch(name)
        is_last = layer is not None and int(layer[1]) == last
        return not (_AFTER_LAYERS.match(name) or (is_last and layer is not None and _AFTER_KV.match(layer[2])))

    return {name: digest for file in files for name, digest in file.tensors.items() if makes_kv(name)}


def _weights(path: Path, cache_dir: Path) -> _Weights:
    """Digests of a safetensors file; read again only when the file is another than last time."""
    stamp = _stamp(path)
    memo = cache_dir / "digests" / f"{xxh3_128_hexdigest(str(path.absolute()).encode())}.json"
    try:
        known = json.loads(memo.read_bytes())
        if known["stamp"] == stamp and known["sum"] == _digest([known["stamp"], known["header"], known["tensors"]]):
            return _Weights(known["header"], known["tensors"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never read, or not by us
    weights = _read(path)
    if _stamp(path) == stamp and time.time() - path.stat().st_ctime > _RACY_S:
        _remember(memo, {"stamp": stamp, "header": weights.header, "tensors": weights.tensors})
    return weights


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _remember(memo: Path, facts: dict[str, Any]) -> None:
    facts["sum"] = _digest([facts["stamp"], facts["header"], facts["tensors"]])
    temp = memo.with_suffix(f".{time.time_ns()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(json.dumps(facts))
        temp.rename(memo)
    except OSError:
        return  # it will be read again next time


def _read(path: Path) -> _Weights:
    with FileIO(path) as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        if num_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        raw = file.read(num_bytes)
        header = {name: facts for name, facts in json.loads(raw).items() if name != "__metadata__"}
        in_order = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        return _Weights(xxh3_128_hexdigest(raw), dict(_tensors(file, in_order)))


def _tensors(file: FileIO, in_order: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name, facts in in_order:
        start, end = facts["data_offsets"]
        digest = xxh3_128(json.dumps([name, facts["dtype"], facts["shape"]]).encode())
        while start < end:
            num_bytes = file.readinto(buffer[: end - start])
            if not num_bytes:
                raise ValueError("a safetensors file is cut short")
            digest.update(buffer[:num_bytes])
            start += num_bytes
        yield name, digest.hexdigest()
