"""Which KV is which: a name for everything that decides what the keys and values of given token ids are.

Two servers may use each other's stored KV when these names are equal, and only then. Knows checkpoint folders and their
bytes. Knows nothing of where KV is stored.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128, xxh3_128_hexdigest

from kvreuse.config import Config, user_cache_dir
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout
from kvreuse.kv.tiers.entry import view_of

__all__ = ["checkpoint_folder", "kv_namespace", "model_digest"]

# Raise it when a payload's layout changes, or when the same model computes other numbers than before, but for rounding.
LAYOUT_VERSION = 1
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


def checkpoint_folder(source: str | Path) -> Path:
    """Where the files of a folder or hub id are. Raises ConfigError when they are not on this machine."""
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    try:
        return Path(str(cached_file(str(source), "config.json", local_files_only=True))).parent
    except OSError:
        raise ConfigError(f"the files of the model {source} are not found, so its stored KV cannot be named") from None


def kv_namespace(config: Config, *, folder: Path, layout: KVLayout) -> str:
    """32 hex digits: equal only where the same tokens have the same stored KV. Raises ConfigError."""
    is_float32 = config.dtype == "auto" and all(device.type == "cpu" for device in layout.devices)
    return _digest(
        {
            "layout": LAYOUT_VERSION,
            "model": model_digest(folder, is_shared=config.cross_model_sharing),
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
    )


def model_digest(folder: Path, *, is_shared: bool = False) -> str:
    """32 hex digits of weights, config, tokenizer, chat template and code. is_shared: only of what makes KV.

    Weights are read once; later their size, times and inode must be as they were. Raises ConfigError when there are no
    weights or they cannot be read.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{folder} holds no safetensors, so its stored KV cannot be named")
    try:
        weights = {path.name: _weights(path) for path in paths}
        if is_shared:
            return _digest(_what_makes_kv(json.loads((folder / "config.json").read_bytes()), list(weights.values())))
        texts = {
            path.name: xxh3_128_hexdigest(path.read_bytes())
            for path in folder.iterdir()
            if path.suffix in _TEXTS and path.name not in _NOT_OF_THE_MODEL and path.is_file()
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"the model in {folder} cannot be read to name its stored KV: {error}") from error
    return _digest([weights, texts])


def _digest(parts: Any) -> str:
    return xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _what_makes_kv(config: dict[str, Any], weights: list[dict[str, str]]) -> list[Any]:
    """What of config and tensors makes keys and values; whatever is not known to come after them counts."""
    last = config.get("num_hidden_layers", config.get("n_layer", 0)) - 1

    def makes_kv(name: str) -> bool:
        layer = _LAYER.fullmatch(name)
        is_last = layer is not None and int(layer[1]) == last
        return not (_AFTER_LAYERS.match(name) or (is_last and layer is not None and _AFTER_KV.match(layer[2])))

    tensors = {name: digest for file in weights for name, digest in file.items() if makes_kv(name)}
    return [{name: value for name, value in config.items() if name not in _NAMES_ONLY}, tensors]


def _weights(path: Path) -> dict[str, str]:
    """Digests of a file's tensors by name; read again only when the file is another than last time."""
    stamp = _stamp(path)
    memo = user_cache_dir() / "digests" / f"{xxh3_128_hexdigest(str(path.absolute()).encode())}.json"
    try:
        known_stamp, tensors, checksum = json.loads(memo.read_bytes())
        if known_stamp == stamp and checksum == _digest([stamp, tensors]):
            return dict(tensors)
    except (OSError, ValueError, TypeError):
        pass  # never read, or not by us
    tensors = _read(path)
    if _stamp(path) == stamp and time.time() - path.stat().st_ctime > _RACY_S:
        temp = memo.with_suffix(f".{time.time_ns()}")
        with suppress(OSError):  # it will be read again next time
            memo.parent.mkdir(parents=True, exist_ok=True)
            temp.write_text(json.dumps([stamp, tensors, _digest([stamp, tensors])]))
            temp.rename(memo)
    return tensors


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: _digest_of(file.get_tensor(name)) for name in file.offset_keys()}


def _digest_of(tensor: torch.Tensor) -> str:
    digest = xxh3_128(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(view_of(tensor.reshape(-1).view(torch.uint8)))
    return digest.hexdigest()
