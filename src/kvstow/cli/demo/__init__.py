"""``kvstow demo``: one long document through a real vLLM server, from every place it can come from."""
