"""kvstow in vLLM: translation between its connector API and the planner and worker, no more."""
