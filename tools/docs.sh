#!/usr/bin/env bash
# Builds the documentation as a site in build/docs/site, with every link and anchor checked.
#
#   tools/docs.sh               the site
#   tools/docs.sh --pictures    makes the pictures in docs/images again, first: needs build/venv (tools/venv.sh)
#
# The generator (mkdocs-material) is installed in build/venv-docs.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"

case "${1:-}" in
  -h | --help) print_help ;;
  --pictures)
    [ -x build/venv/bin/python ] || fail "build/venv is missing: run tools/venv.sh"
    build/venv/bin/python -B tools/docs/pictures.py
    ;;
  "") ;;
  *) fail "unknown option: $1" ;;
esac
install_missing "${packages_python[@]}"
venv=build/venv-docs
[ -x $venv/bin/mkdocs ] || python3 -m venv --clear $venv
$venv/bin/python -m pip --disable-pip-version-check install -q 'mkdocs-material>=9,<10' ||
  fail "pip could not install mkdocs-material: is there a network?"
$venv/bin/python -B tools/docs/site.py
NO_MKDOCS_2_WARNING=1 $venv/bin/python -B -m mkdocs build --strict --config-file build/docs/mkdocs.yml
say "build/docs/site/index.html"
