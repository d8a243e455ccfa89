"""Measuring a service: an open-loop load generator, and intervals of what it measured."""
