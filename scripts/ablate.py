"""The same as ``minillama ablate``: python scripts/ablate.py --help."""

from minillama.__main__ import run

if __name__ == "__main__":
    run("ablate")
