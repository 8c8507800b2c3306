"""A vLLM request's chunk ids, from its block hashes or, where those are not stable, its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstow.keys.chain import EngineChain, Extras, Media, TokenChain
from kvstow.keys.ids import ChunkId

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestKeys:
    """Chunk ids of one request; grows with it.

    Args:
        request: read only while this is made.
        chunk_tokens: tokens per chunk.
        hash_tokens: tokens that one engine hash covers, or 0 to hash tokens here.
        adapter_digest: content of the request's LoRA adapter, or b"".
        era: as `kvstow.keys.chain.Extras.era`.
    """

    def __init__(
        self, request: Request, chunk_tokens: int, hash_tokens: int, adapter_digest: bytes, era: bytes
    ) -> None:
        self._engine: EngineChain | None = None
        self._tokens: TokenChain | None = None
        if hash_tokens:
            self._engine = EngineChain(chunk_tokens // hash_tokens, adapter_digest or None, era)
        else:
            self._tokens = TokenChain(chunk_tokens, _extras(request, adapter_digest, era))

    def update(self, request: Request) -> Sequence[ChunkId]:
        """The ids of all whole chunks of the request's known tokens; costs what is new."""
        if self._engine is not None:
            return self._engine.follow(request.block_hashes)
        assert self._tokens is not None
        seen = self._tokens.num_tokens
        if seen < request.num_tokens:
            self._tokens.extend(list(request.all_token_ids[seen : request.num_tokens]))
        return self._tokens.ids


def _extras(request: Request, adapter_digest: bytes, era: bytes) -> Extras:
    lora = request.lora_request
    embeds = request.prompt_embeds
    return Extras(
        lora_name=lora.lora_name if lora is not None else "",
        lora_digest=adapter_digest,
        cache_salt=request.cache_salt or "",
        embeds_digest=b"" if embeds is None else _embeds_digest(embeds),
        media=tuple(
            Media(feature.mm_position.offset, feature.mm_position.length, feature.identifier)
            for feature in request.mm_features or ()
        ),
        era=era,
    )


def _embeds_digest(embeds: object) -> bytes:
    import torch

    assert isinstance(embeds, torch.Tensor)
    flat = embeds.detach().cpu().contiguous()
    shape = f"{flat.dtype} {tuple(flat.shape)} ".encode()
    return hashlib.sha256(shape + flat.view(torch.uint8).numpy().tobytes()).digest()
