"""``minillama train``, for those who run scripts: python scripts/train.py --help."""

import sys

from minillama.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
