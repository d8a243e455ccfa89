"""Runs as metrics: families, exporter, dashboards, alert rules; and `top`."""
