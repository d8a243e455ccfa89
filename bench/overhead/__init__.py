"""What the trainer costs on top of an engine: its step against a loop that only trains.

Belongs here: measuring that for every engine in the same way. Does not belong here: speed of
engines themselves, planning.
"""
