"""Summaries of metrics and traces, and where the wall time of a run went."""
