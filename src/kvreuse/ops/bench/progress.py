"""Says on a terminal how far a measurement is. Knows counts and names, nothing of what is measured."""

from __future__ import annotations

from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 32


class Progress:
    """`num_steps` steps in named phases: one bar that moves on a terminal, a line per phase anywhere else."""

    def __init__(self, out: TextIO, *, num_steps: int) -> None:
        self._out = out
        self._num_steps = num_steps
        self._num_done = 0
        self._phase = ""

    def start(self, phase: str) -> None:
        """What follows is part of `phase`."""
        self._phase = phase
        if not self._out.isatty():
            print(f"{self._num_done}/{self._num_steps} {phase}", file=self._out, flush=True)
        self._draw()

    def advance(self) -> None:
        """One step more is done."""
        self._num_done += 1
        self._draw()

    def close(self) -> None:
        """Leave the terminal as it was found."""
        self._redraw("")

    def _draw(self) -> None:
        filled = _WIDTH * self._num_done // self._num_steps
        bar = "█" * filled + "░" * (_WIDTH - filled)
        self._redraw(f"{bar} {self._num_done}/{self._num_steps} {self._phase}")

    def _redraw(self, line: str) -> None:
        if self._out.isatty():
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)
