"""Lay ranks out: layout, pipeline stages, batch split, placement, islands, order of axes. Pure."""
