"""``minillama generate``, for those who run scripts: python scripts/generate.py --help."""

import sys

from minillama.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
