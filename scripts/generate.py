"""The same as ``minillama generate``: python scripts/generate.py --help."""

from minillama.cli import entry_point

if __name__ == "__main__":
    entry_point("generate")
