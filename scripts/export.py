"""The same as ``minillama export``: python scripts/export.py --help."""

from minillama.cli import entry_point

if __name__ == "__main__":
    entry_point("export")
