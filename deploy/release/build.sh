#!/usr/bin/env bash
# Build what a release is made of, from the files that git knows: deploy/release/build.sh [OUT]
#
#   OUT/lazytrain-VERSION.tar.gz                          sources
#   OUT/lazytrain-VERSION-cp310-abi3-manylinux_*.whl      for every supported Python, with the native kernel
#   OUT/SHA256SUMS
#
# Needs git, a C++ compiler and pip install "lazytrain[release]". The wheel is built from the sources' archive, so that
# what is missing there shows. The tag says which systems it runs on: those of a glibc as old as the symbols it uses.
set -euo pipefail

root="$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)"
out="${1:-$root/dist}"
python="${PYTHON:-python3}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/tree" "$work/raw"
out="$(cd "$out" && pwd)"
SOURCE_DATE_EPOCH="$(git -C "$root" log -1 --format=%ct)"
export SOURCE_DATE_EPOCH

# Links stay links, so the package is built from the four folders as in a clone.
git -C "$root" ls-files -z | tar --create --null --directory "$root" --files-from - | tar --extract --directory "$work/tree"
"$python" -m build --no-isolation --outdir "$work/raw" "$work/tree"

"$python" -m auditwheel repair --wheel-dir "$out" "$work"/raw/*.whl
cp "$work"/raw/*.tar.gz "$out"
cd "$out"
"$python" -m auditwheel show lazytrain-*.whl
sha256sum lazytrain-*.whl lazytrain-*.tar.gz >SHA256SUMS
