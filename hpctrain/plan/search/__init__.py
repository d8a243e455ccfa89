"""Enumerate layouts, keep those that fit, and rank them. Pure."""
