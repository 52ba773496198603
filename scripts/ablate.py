"""The same as ``minillama ablate``: python scripts/ablate.py --help."""

from minillama.cli import entry_point

if __name__ == "__main__":
    entry_point("ablate")
