"""Faults in what names bytes, and in how they are stored and moved: framing, keys, layout, codec."""

from __future__ import annotations

from mutant import Mutant

_FRAMING = "stores/framing.py"
_CHAIN = "keys/chain.py"
_NAMESPACE = "keys/namespace.py"

FRAMING = (
    Mutant(
        "skip the checksum",
        "Verified before a byte reaches a block: a bit that flipped on disk would be served.",
        _FRAMING,
        "    if actual != checksum:",
        "    if actual == 0:",
    ),
    Mutant(
        "do not compare the key in the header",
        "Exactly this prefix: a file under a wrong name would be served as somebody else's prompt.",
        _FRAMING,
        '    _agree("key", key, identity.key)\n',
        "",
    ),
    Mutant(
        "do not compare the rank in the header",
        "Exactly this rank: one rank would attend to the heads of another.",
        _FRAMING,
        '    _agree("rank", rank, identity.rank)\n',
        "",
    ),
)

KEYS = (
    Mutant(
        "key without the salt",
        "Tenants are kept apart: one could find out, by time, what another has asked.",
        _CHAIN,
        '        items += _item(b"salt", _text(extras.cache_salt))',
        '        items += b""',
    ),
    Mutant(
        "key without the content of media",
        "Two prompts with other images share no key: the model would answer about somebody else's picture.",
        _CHAIN,
        '            _item(b"media", _text(item.identifier), _number(item.offset), _number(item.tokens))',
        '            _item(b"media", _number(item.offset), _number(item.tokens))',
    ),
    Mutant(
        "key without the offset of media",
        "Where an image lies is part of the prompt: one that moved by a token would pass for the old one.",
        _CHAIN,
        '            _item(b"media", _text(item.identifier), _number(item.offset), _number(item.tokens))',
        '            _item(b"media", _text(item.identifier), _number(item.tokens))',
    ),
    Mutant(
        "key without the content of the LoRA adapter",
        "A name can be pointed at other weights: a retrained adapter would be served from its old cache.",
        _CHAIN,
        '        items += _item(b"lora", _text(extras.lora_name), extras.lora_digest)',
        '        items += _item(b"lora", _text(extras.lora_name))',
    ),
    Mutant(
        "engine's hashes without the content of the LoRA adapter",
        "Engines hash an adapter's name and path alone: retrained weights at the same path would hit.",
        _CHAIN,
        'frame(lora_digest or b"")',
        'frame(b"")',
    ),
    Mutant(
        "key without the parent",
        "A chunk is named with all before it: the same words after another beginning would hit.",
        _CHAIN,
        'b"".join((head, parent, length, words, frame(extras)))',
        'b"".join((head, ROOT_CHUNK, length, words, frame(extras)))',
    ),
    Mutant(
        "key without the group",
        "Exactly this group: full attention's frame would pass as a window's.",
        _CHAIN,
        '        group.to_bytes(4, "little"),',
        "        bytes(4),",
    ),
    Mutant(
        "key without the rank",
        "Exactly this rank: two ranks' shares of one chunk would have one name.",
        _NAMESPACE,
        'rank.to_bytes(4, "little"), layout_digest',
        "bytes(4), layout_digest",
    ),
    Mutant(
        "parts without their length",
        "Bytes cannot move to a neighbouring part: a crafted salt could spell another tenant's extras.",
        "keys/digest.py",
        '    return len(part).to_bytes(_LENGTH_BYTES, "little") + part',
        "    return part",
    ),
    Mutant(
        "namespace without the KV dtype",
        "All that must agree: fp8 bytes would be read as bf16 after a change of one flag.",
        _NAMESPACE,
        '    fields["model_config"] = _without_volatile(',
        '    del fields["kv_dtype"]\n    fields["model_config"] = _without_volatile(',
    ),
    Mutant(
        "namespace without the rope base",
        "Every config value that changes the bytes: keys that were rotated otherwise would be loaded.",
        _NAMESPACE,
        'frozenset({"_name_or_path", ',
        'frozenset({"rope_theta", "_name_or_path", ',
    ),
)

LAYOUT = (
    Mutant(
        "layout without what lies inside a block",
        "Strides that matter: K before V and V before K would be taken for the same bytes.",
        "layout/fingerprint.py",
        "[[segment.block_bytes, segment.inner] for segment in group.segments]",
        "[[segment.block_bytes] for segment in group.segments]",
    ),
    Mutant(
        "native codec takes blocks for packed",
        "Bit for bit: where blocks lie further apart than they are long, other blocks' bytes would be saved.",
        "codec/native.py",
        "(segment.region, segment.offset_bytes, segment.block_stride_bytes, segment.block_bytes)",
        "(segment.region, segment.offset_bytes, segment.block_bytes, segment.block_bytes)",
    ),
    Mutant(
        "torch codec takes blocks for packed",
        "Bit for bit: hosts without a compiler would save other blocks' bytes.",
        "codec/torch_codec.py",
        "        (segment.block_stride_bytes // size, 1),",
        "        (segment.block_bytes // size, 1),",
    ),
    Mutant(
        "native codec writes the blocks to be skipped",
        "Never below the floor: blocks that other requests share would be written under them.",
        "codec/native.py",
        "_native.scatter(self._bound, ids, source, skip_blocks, self._threads)",
        "_native.scatter(self._bound, ids, source, 0, self._threads)",
    ),
)

STORES = (
    Mutant(
        "ranks share one folder",
        "Exactly this rank: each rank would overwrite what the other has stored, and find nothing again.",
        "stores/disk/names.py",
        'return f"{root}/{namespace.hex()[:32]}/r{rank}"',
        'return f"{root}/{namespace.hex()[:32]}/r0"',
    ),
    Mutant(
        "a second engine gets the folder",
        "A root is private to one engine: two would evict each other's files and break both budgets.",
        "stores/disk/root.py",
        "        if holder.instance != me.instance or holder.rank == me.rank:",
        "        if holder.rank < 0:",
    ),
    Mutant(
        "a short write is a file",
        "Visible whole or not at all: a full device would leave half frames that look stored.",
        "stores/disk/files.py",
        "            if moved != len(content):\n                raise OSError",
        "            if moved < 0:\n                raise OSError",
    ),
    Mutant(
        "the disk's budget is overdrawn by a frame",
        "Budgets are hard: the file system would run full for everybody else on the machine.",
        "stores/disk/usage.py",
        "            if self._stored_bytes + self._reserved_bytes + size_bytes > self._budget_bytes:",
        "            if self._stored_bytes + self._reserved_bytes > self._budget_bytes:",
    ),
    Mutant(
        "files that were deleted by hand are never recounted",
        "Never stuck: a disk that was cleaned to free space would take nothing more until a restart.",
        "stores/disk/share.py",
        "- self._counted_s >= RECOUNT_PAUSE_S:",
        "- self._counted_s >= RECOUNT_PAUSE_S * 1e9:",
    ),
    Mutant(
        "a full disk is recounted every second",
        "Fast: a full disk with many frames would be walked all the time, for puts that find no room anyway.",
        "stores/disk/share.py",
        "RECOUNT_PAUSE_S = 60.0",
        "RECOUNT_PAUSE_S = 1.0",
    ),
    Mutant(
        "a recount misses what is put behind it",
        "Budgets are hard: each recount would leave the count lower than what lies on disk.",
        "stores/disk/usage.py",
        "            self._recount.found_bytes += by_bytes",
        "            self._recount.found_bytes += min(by_bytes, 0)",
    ),
    Mutant(
        "a recount misses folders that are newer than it",
        "Budgets are hard: the first frames of a group that begins in a recount would not be counted.",
        "stores/disk/usage.py",
        "            missed = self._recount.changed - self._recount.listed",
        "            missed = set[str]()",
    ),
    Mutant(
        "a recount forgets the puts under way",
        "Budgets are hard: their frames would come on top of a disk that is full already.",
        "stores/disk/usage.py",
        "                self._stored_bytes = self._recount.found_bytes",
        "                self._stored_bytes = self._recount.found_bytes - self._reserved_bytes",
    ),
    Mutant(
        "a recount lists a folder while frames come and go",
        "Budgets are hard: what becomes a file meanwhile would count twice or not at all.",
        "stores/disk/share.py",
        "        with self.naming(folder):",
        "        with threading.Lock():",
    ),
    Mutant(
        "a removal before the first scan is not noted",
        "Never promise what is not there: the self-test's frames would be promised to requests.",
        "stores/disk/store.py",
        "            self._inventory.drop(ref)",
        "            self._inventory.touch(ref, 0.0)",
    ),
    Mutant(
        "the first scan knows no frame that was put before it",
        "Bounded: the file would stay, known to nobody, until the next start.",
        "stores/disk/store.py",
        "            self._inventory.add(StoredFrame(ref, len(frame), touched_s))",
        "            self._inventory.drop(ref)",
    ),
)
