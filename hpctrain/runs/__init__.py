"""Runs that exist: finding out their state and explaining it, steering them, watching over them."""
