"""Commands plan the same few examples again and again."""

from planned_once import planned_once

__all__ = ["planned_once"]
