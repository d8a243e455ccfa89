"""Measures of the code base and pictures of its rooms, from its syntax trees.

`python -m bench.house` prints the measures; `--pictures` writes docs/rooms.md anew. Belongs here:
counting and drawing. Does not belong here: limits that fail a test (tests/test_house.py).
Standard library only, so that it also measures an old checkout: `python -m bench.house DIRECTORY`.
"""
