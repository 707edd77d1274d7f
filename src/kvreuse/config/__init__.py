"""One frozen configuration, from serving.properties, environment and flags. Knows nothing of what uses it."""

from kvreuse.config.kinds import Option
from kvreuse.config.load import load_config, set_torch_defaults, user_cache_dir
from kvreuse.config.names import FLAG_NAMES, unknown
from kvreuse.config.options import DEFAULT_MODEL_DIR, OPTIONS, Config

__all__ = ["DEFAULT_MODEL_DIR", "FLAG_NAMES", "OPTIONS", "Config", "Option", "load_config", "set_torch_defaults",
           "unknown", "user_cache_dir"]  # fmt: skip
