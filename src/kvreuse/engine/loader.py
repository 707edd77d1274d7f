"""Load a stock Transformers model and its tokenizer, or say in one sentence why it cannot be served.

Knows checkpoints, devices and what the attention backends can do. Knows nothing of requests or the KV store.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvreuse.config import Config
from kvreuse.engine.demo_model import demo_model_path, quiet_transformers
from kvreuse.engine.probe import probe_layout
from kvreuse.engine.tokenizer import Tokenizer
from kvreuse.errors import ConfigError
from kvreuse.kv.layout import KVLayout

__all__ = ["LoadedModel", "check_supported", "configure_threads", "load_model"]

log = logging.getLogger("kvreuse.engine")

SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary schemes whose frequencies change once a sequence is longer than the model was first trained for.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
LOAD_ERRORS = (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError)
NO_MAX_LENGTH = 10**9  # tokenizers without a limit say 1e30


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready for inference.

    source: the folder or hub id that it came from. max_model_len: prompt plus answer, in tokens.
    eos_token_ids: those that end `model.generate` too.
    """

    model: Any
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    name: str
    source: str

    @functools.cached_property
    def layout(self) -> KVLayout:
        """The KV of its layers, read off a short forward before the first engine changes them. Raises ConfigError."""
        return probe_layout(self.model)


def load_model(config: Config, *, device: torch.device, attn_implementation: str) -> LoadedModel:
    """Load what `config.model_id` names: a folder (or one that holds one checkpoint), a hub id, or `demo`.

    attn_implementation: a name registered with Transformers' AttentionInterface.
    Raises ConfigError: not found, not supported, incomplete, no safetensors, or longer than the model allows.
    """
    source = _source(config.model_id)
    trusted = {"trust_remote_code": config.trust_remote_code}
    with quiet_transformers(), _loading(source):
        hf_config = AutoConfig.from_pretrained(source, **trusted)
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(source, **trusted))
        max_model_len = _max_model_len(hf_config, tokenizer, config.max_model_len)
        check_supported(hf_config, max_model_len=max_model_len)
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=_dtype(config.dtype, device),
            device_map=_device_map(device),
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **trusted,
        )
    _check_loaded(model, sorted(info["missing_keys"]), source)
    model.eval()
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_model_len=max_model_len,
        name=Path(source).resolve().name if Path(config.model_id).is_dir() else config.model_id,
        source=source,
    )


def check_supported(hf_config: Any, *, max_model_len: int) -> None:
    """Raise ConfigError for a Transformers config whose model would be served wrong; it names the reason."""
    text = hf_config.get_text_config(decoder=True)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    # Bloom knows no other positions, so its config does not mention them.
    has_alibi = text.model_type == "bloom" or any(
        getattr(part, "alibi", False) for part in (text, getattr(text, "attn_config", None))
    )
    others = ", ".join(sorted(set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES))
    refusals = {
        "it is an encoder-decoder model": getattr(hf_config, "is_encoder_decoder", False),
        "it is no causal language model": model_class is None and not has_own_code,
        "it uses ALiBi positions": has_alibi,
        "it caps attention scores (attn_logit_softcapping)": getattr(text, "attn_logit_softcapping", None),
        "its attention looks ahead (use_bidirectional_attention)": (
            getattr(text, "use_bidirectional_attention", False) is True
        ),
        f"it has layers of type {others}; served are full_attention and sliding_attention": others,
        "it has recurrent layers": getattr(model_class, "_is_stateful", False),
        "its attention does not go through Transformers' attention interface": (
            model_class is not None and not model_class._supports_attention_backend
        ),
    }
    reasons = [reason for reason, is_so in refusals.items() if is_so]
    reasons += _rope_refusals(text, max_model_len=max_model_len)
    if reasons:
        raise ConfigError(f"the model type {hf_config.model_type} cannot be served: {reasons[0]}")


def _rope_refusals(text: Any, *, max_model_len: int) -> Iterator[str]:
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind not in LENGTH_DEPENDENT_ROPE:
            continue
        limit = text.max_position_embeddings if kind == "dynamic" else rope["original_max_position_embeddings"]
        if max_model_len > limit:
            yield (
                f"its rotary frequencies ({kind}) change with the length beyond {limit} tokens\n"
                f"hint: set option.max_model_len to at most {limit}"
            )


def _max_model_len(hf_config: Any, tokenizer: Tokenizer, wanted: int | None) -> int:
    text = hf_config.get_text_config(decoder=True)
    limit: int = getattr(text, "max_position_embeddings", None) or 0
    if not limit and tokenizer.hf.model_max_length < NO_MAX_LENGTH:
        limit = tokenizer.hf.model_max_length
    if wanted is None and not limit:
        raise ConfigError("the model does not say how long its sequences may be\nhint: set option.max_model_len")
    if wanted is not None and limit and wanted > limit:
        raise ConfigError(f"option.max_model_len is {wanted}, allowed is at most {limit}, the model's own limit")
    return wanted or limit


def _check_loaded(model: Any, missing_keys: list[str], source: str) -> None:
    if missing_keys:
        raise ConfigError(f"the checkpoint {source} lacks {len(missing_keys)} weights, the first is {missing_keys[0]}")
    offloaded = {str(place) for place in getattr(model, "hf_device_map", {}).values()} & {"cpu", "disk"}
    if offloaded and model.device.type != "cpu":
        raise ConfigError(f"the model {source} does not fit in the memory of the GPUs")
    for module in model.modules():
        # Layers of the decoder are numbered; the encoders of images beside it may look ahead.
        if getattr(module, "is_causal", True) is False and getattr(module, "layer_idx", None) is not None:
            raise ConfigError(f"the model type {model.config.model_type} cannot be served: its attention looks ahead")


def _source(model_id: str) -> str:
    if model_id == "demo":
        return str(demo_model_path())
    folder = Path(model_id)
    if not folder.is_dir():
        if folder.is_absolute() or model_id.startswith("."):
            raise ConfigError(f"there is no model folder {model_id}\nhint: set option.model_id")
        return model_id
    if (folder / "config.json").is_file():
        return str(folder)
    found = sorted({path.parent for depth in ("*", "*/*") for path in folder.glob(f"{depth}/config.json")})
    if not found:
        raise ConfigError(f"{model_id} holds no config.json")
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ConfigError(f"{model_id} holds several models: {names}\nhint: set option.model_id to one of them")
    return str(found[0])


@contextmanager
def _loading(source: str) -> Iterator[None]:
    try:
        yield
    except LOAD_ERRORS as error:
        log.debug("loading %s failed", source, exc_info=True)
        lines = str(error).strip().splitlines()
        raise ConfigError(f"cannot load {source}: {lines[0] if lines else type(error).__name__}") from error


def _dtype(name: str, device: torch.device) -> str:
    """`auto` is that of the checkpoint, but on a CPU float32."""
    return "float32" if name == "auto" and device.type == "cpu" else name


def _device_map(device: torch.device) -> Any:
    """Several GPUs share the layers between them."""
    if device.type == "cpu":
        return None
    return "auto" if device.index is None and torch.cuda.device_count() > 1 else {"": device}


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    for part in (model.generation_config, model.config.get_text_config(decoder=True), tokenizer.hf):
        found = getattr(part, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def configure_threads(num_threads: int | None, *, cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Set and return the number of CPU threads of a forward.

    None takes what torch found (the physical cores it may run on, or OMP_NUM_THREADS), but no more than the CPU time
    that the container is given: threads that wait for a throttled one only burn the rest of it.
    """
    if num_threads is None:
        num_threads = min(torch.get_num_threads(), _cpu_quota(cgroup) or torch.get_num_threads())
    torch.set_num_threads(num_threads)
    return num_threads


def _cpu_quota(cgroup: Path) -> int | None:
    """Whole CPUs that the control group allows, at least 1; None without a limit."""
    try:
        quota, period = cgroup.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
