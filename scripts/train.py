"""The same as ``minillama train``: python scripts/train.py --help."""

from minillama.cli import entry_point

if __name__ == "__main__":
    entry_point("train")
