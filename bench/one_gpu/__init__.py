"""The planner against one real GPU (`python -m bench.one_gpu`)."""
