"""A small picture at the end of the terminal, redrawn in place below the lines that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pidurable.cli._host import Host

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

__all__ = ["REDRAW_SECONDS", "Display"]

REDRAW_SECONDS = 0.125


class Display:
    """A small picture at the end of the terminal, below the lines that stay.

    While somebody types it is away, and lines wait: both would be written into what is typed.
    """

    def __init__(self, host: Host, picture: Callable[[int], list[str]]) -> None:
        from rich.console import Console

        self._console = Console(
            file=host.display_stream(),
            force_terminal=True,
            no_color=not host.has_colour(host.stderr),
            highlight=False,
            markup=False,
            emoji=False,
        )
        self._picture = picture
        self._held: list[tuple[str, str]] = []
        self._live = self._made()

    def _made(self) -> Live:
        from rich.live import Live

        # One that was stopped would draw over what was written since, so each is used once.
        return Live(
            self._drawn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def _drawn(self) -> Text:
        from rich.text import Text

        lines = self._picture(self._console.width)
        return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def draw(self) -> None:
        """Show the picture as it is now."""
        if self._live.is_started:
            self._live.update(self._drawn(), refresh=True)

    def above(self, lines: Iterable[str], style: str) -> None:
        """Write lines that stay, as soon as nobody types."""
        from rich.text import Text

        self._held += [(line, style) for line in lines]
        if self._live.is_started:
            for line, its_style in self._held:
                self._console.print(Text(line, style=its_style), soft_wrap=True)
            self._held.clear()

    def pause(self, quiet: bool) -> None:
        """Take the picture away because somebody types, or give it back."""
        if quiet:
            self._live.stop()
        elif not self._live.is_started:
            self._live = self._made()
            self._live.start()
            self.above((), "")
