"""Runs as metrics: what is exposed, in which text, and what Prometheus and Grafana make of it."""
