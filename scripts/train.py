"""The same as ``minillama train``: python scripts/train.py --help."""

from minillama.__main__ import run

if __name__ == "__main__":
    run("train")
