"""Settings, and the only reader of the environment."""

from kvstow.config.load import load_settings
from kvstow.config.settings import Settings, check_chunk, choose_chunk, resolve_arena_bytes

__all__ = ["Settings", "check_chunk", "choose_chunk", "load_settings", "resolve_arena_bytes"]
