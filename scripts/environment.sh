# Sourced by the other scripts: enters .venv, making it and installing the pinned versions first
# where they are missing or where pyproject.toml or constraints.txt have changed since.
# Usage: source scripts/environment.sh EXTRAS       for example: dev

cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$1
python=${PYTHON:-python3}
stamp=.venv/minillama-$extras

if [ ! -x .venv/bin/python ]; then
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "minillama needs Python 3.11 to 3.13, and $python is not one; set PYTHON=/path/to/python3" >&2
        exit 2
    fi
    "$python" -m venv .venv
fi
if ! cat pyproject.toml constraints.txt | cmp -s - "$stamp"; then
    echo "Installing minillama[$extras] and its pinned dependencies into .venv ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[$extras]"
    cat pyproject.toml constraints.txt >"$stamp"
fi
PATH=$PWD/.venv/bin:$PATH
