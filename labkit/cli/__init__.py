"""The `labkit` command: each subcommand is a function from parsed options to one answer. Imports no torch.

`entry` finds the command, prints its answer and maps errors to exit codes; `options` turns words into settings; the
other files hold the commands.
"""

from labkit.cli.entry import main

__all__ = ["main"]
