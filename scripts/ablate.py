"""``minillama ablate``, for those who run scripts: python scripts/ablate.py --help."""

import sys

from minillama.cli import main

if __name__ == "__main__":
    sys.exit(main(["ablate", *sys.argv[1:]]))
