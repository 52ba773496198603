"""The same as ``minillama generate``: python scripts/generate.py --help."""

from minillama.__main__ import run

if __name__ == "__main__":
    run("generate")
