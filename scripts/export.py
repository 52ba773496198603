"""``minillama export``, for those who run scripts: python scripts/export.py --help."""

import sys

from minillama.cli import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
