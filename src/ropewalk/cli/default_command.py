"""Groups with a command that needs no name: ``ropewalk eval MODEL`` beside ``ropewalk eval compare``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultCommand(TyperGroup):
    """A group whose one hidden command runs where no command is named."""

    @property
    def default(self) -> str:
        """The name of the hidden command."""
        return next(name for name, command in self.commands.items() if command.hidden)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Anything but the name of a command is the beginning of the default's arguments."""
        if not args or args[0] not in self.commands:
            args = [self.default, *args]
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command to run; the default goes by no name of its own."""
        name, command, rest = super().resolve_command(ctx, args)
        return ("" if name == self.default else name), command, rest
