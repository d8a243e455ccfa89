"""What a terminal shows after a program has written to it: as much of ECMA-48 as ours need.

Belongs here: a grid of characters with their colours, the position of the cursor, and which modes
are on.
"""

from __future__ import annotations

import codecs
import re

_SEQUENCE = re.compile(
    r"\x1b\[([<-?]?)([\d;:]*)([ -/]*)([@-~])|\x1b[PX^_\]].*?(?:\x1b\\|\x07)|\x1b."
)


class TerminalScreen:
    """Feed it what a program writes; `text` is what a person sees, `modes` what is switched on."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.modes: set[int] = set()
        self.codes_of_colours: list[str] = []
        self._grid = self._empty()
        self._style = ""
        self._line = self._column = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._left = ""

    @property
    def text(self) -> str:
        return "\n".join("".join(cell for cell, _ in line).rstrip() for line in self._grid)

    @property
    def coloured_text(self) -> str:
        """The same with the codes of colours, as a program could print it."""
        lines = []
        for line in self._grid:
            cells, before = [], ""
            for cell, style in line:
                cells.append((f"\x1b[0m{style}" if style != before else "") + cell)
                before = style
            lines.append("".join(cells) + "\x1b[0m")
        return "\n".join(lines)

    def _empty(self) -> list[list[tuple[str, str]]]:
        return [[(" ", "")] * self.columns for _ in range(self.lines)]

    def feed(self, data: bytes) -> None:
        text, place = self._left + self._decoder.decode(data), 0
        self._left = ""
        while place < len(text):
            if text[place] == "\x1b":
                match = _SEQUENCE.match(text, place)
                if match is None:  # the rest comes later
                    self._left = text[place:]
                    return
                self._follow(match)
                place = match.end()
            else:
                self._write(text[place])
                place += 1

    def _write(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            if self._line == self.lines - 1:
                self._grid = [*self._grid[1:], self._empty()[0]]
            self._line = min(self.lines - 1, self._line + 1)
        elif character >= " ":
            if self._column < self.columns:
                self._grid[self._line][self._column] = character, self._style
            self._column += 1

    def _follow(self, match: re.Match[str]) -> None:
        private, given, _, final = match.groups()
        numbers = [int(one or 0) for one in re.split("[;:]", given or "")]
        if final == "m" and not private:
            self.codes_of_colours.append(given)
            self._style = "" if given in ("", "0") else f"{self._style}\x1b[{given}m"
        elif final in ("h", "l") and private == "?":
            (self.modes.update if final == "h" else self.modes.difference_update)(numbers)
        elif final in ("H", "f"):
            line, column = (*numbers, 1)[:2] if len(numbers) < 2 else numbers[:2]
            self._line = max(0, min(self.lines, line or 1) - 1)
            self._column = max(0, min(self.columns, column or 1) - 1)
        elif final == "J" and numbers[0] in (2, 3):
            self._grid = self._empty()
        elif final == "K":
            for column in range(self._column, self.columns):
                self._grid[self._line][column] = " ", ""
