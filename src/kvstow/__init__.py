"""kvstow: KV-cache offload for LLM servers. Never wrong, never stuck, fast."""

__version__ = "0.1.0"
