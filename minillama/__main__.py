"""``python -m minillama`` is the command line."""

from minillama.cli import entry_point

entry_point()
