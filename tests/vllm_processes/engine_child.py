"""A program: vLLM's offline engine, driven by JSON messages over one pipe.

Usage: ``engine_child.py CONNECTION_FD OPTIONS_JSON``, or `serve_forked` in a process that was forked
from one which had vLLM imported. Messages: ``{"ask": token_ids}``, ``{"ask_about": prompt}`` (of
`prompt_json`), ``{"numbers": null}``, ``{"forget": null}``, ``{"stop": null}``; each but the last is
answered with one message. The first answer is ``"ready"``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from prompt_json import from_json

if TYPE_CHECKING:
    from vllm import LLM

TOKENS_OUT = 4


def ask(llm: LLM, prompt: Any) -> dict[str, Any]:
    """Answer one prompt greedily: tokens, their log-probabilities, and how much of the prompt was cached."""
    from vllm import SamplingParams

    # Two random models may agree on four tokens by luck, never on the log-probabilities.
    sampling = SamplingParams(
        max_tokens=TOKENS_OUT, temperature=0, logprobs=4, ignore_eos=True, detokenize=False
    )
    [output] = llm.generate(prompt, sampling, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            sorted((token, entry.logprob) for token, entry in step.items()) for step in completion.logprobs
        ],
        "cached": output.num_cached_tokens,
        "length": len(output.prompt_token_ids),
    }


def numbers() -> Mapping[str, float]:
    """kvstow's numbers as they are in vLLM's Prometheus registry, by name and tier."""
    from prometheus_client import REGISTRY

    return {
        "_".join(filter(None, [sample.name, sample.labels.get("tier")])): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("kvstow_") and not sample.name.endswith("_created")
    }


def serve(connection: Connection, options: dict[str, Any]) -> LLM:
    """Start an engine and answer until told to stop."""
    from vllm import LLM

    llm = LLM(**options)
    connection.send_bytes(b'"ready"')
    while True:
        [(verb, argument)] = json.loads(connection.recv_bytes()).items()
        if verb == "stop":
            return llm
        match verb:
            case "ask":
                answer: object = ask(llm, {"prompt_token_ids": argument})
            case "ask_about":
                answer = ask(llm, from_json(argument))
            case "forget":
                answer = llm.reset_prefix_cache()
            case _:
                answer = numbers()
        connection.send_bytes(json.dumps(answer).encode())


def serve_forked(connection: Connection, options: dict[str, Any]) -> None:
    """The same, in a forked process."""
    llm = serve(connection, options)
    # Such a process ends without the interpreter's goodbye, on which vLLM relies otherwise.
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
