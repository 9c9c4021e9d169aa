#!/usr/bin/env bash
# Build the wheel and the source package of the last commit, and check them.  Uploads nothing.
#
#   scripts/release.sh URL [FOLDER]
#
# URL is where the files of this release can be read; the links of the README in the packages begin
# with it.  RAW is the same for pictures, where that differs.  FOLDER gets the packages (dist).
# SOURCE=<folder> packs that folder instead of the commit, and leaves out the tests of the packages.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
url="${1:?usage: scripts/release.sh URL [FOLDER]}"
out="$(realpath -m "${2:-dist}")"
python="${PYTHON:-$PWD/.venv/bin/python}"
tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT

if [ -n "${SOURCE:-}" ]; then
    cp -r "$SOURCE/." "$tree"
else
    git archive HEAD | tar -x -C "$tree"
fi
# On a package index a relative link leads nowhere.
sed -E -i -e "s#(!\[[^]]*\]\()([^):]+\))#\1${RAW:-$url}/\2#g" \
    -e "s#\]\(([^):\#][^):]*\))#](${url}/\1#g" "$tree/README.md"
rm -f "$out"/megatron_ft-*
"$python" -m build --no-isolation --outdir "$out" "$tree"
"$python" -m twine check --strict "$out"/*
[ -n "${SOURCE:-}" ] || PACKAGES="$out" "$python" -m pytest -q tests/repository/test_packaging.py
