"""Imports what an engine needs, once, in the process that the tests' engines are forked from."""

import stack_child
import vllm.inputs
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
import vllm_children

import kvstow.adapters.vllm.connector

__all__ = ["kvstow", "stack_child", "vllm", "vllm_children"]
