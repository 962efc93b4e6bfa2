"""``python -m ropewalk``: the command line, also under torchrun."""

from ropewalk.cli.app import run

run()
