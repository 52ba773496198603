"""The same as ``minillama export``: python scripts/export.py --help."""

from minillama.__main__ import run

if __name__ == "__main__":
    run("export")
