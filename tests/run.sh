#!/usr/bin/env bash
# Installs the pinned tools, and the project with its compiled kernel, into .venv-test (kept between
# runs), then runs every check but the tests marked slow, in two processes. Arguments go to pytest:
#   bash tests/run.sh tests/solver -k ties       bash tests/run.sh -m slow       bash tests/run.sh -n 0 -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null
unset PYTHONDONTWRITEBYTECODE  # the tests start Python thousands of times

venv=${NEST_MEGATRON_TEST_VENV:-$PWD/.venv-test}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
export PATH="$venv/bin:$PATH"
# Of torch and the like, few modules are ever imported: they are compiled when they are.
install() { python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }

# torch by its exact version and before anything that only asks for "torch".
install "$(grep '^torch==' requirements-dev.txt)"
install --requirement requirements-dev.txt
# It asks for Python 3.12, and works on 3.11: there pip builds it from its source package (25 s).
install --no-deps --ignore-requires-python "$(grep -o 'megatron-core==[0-9.]*' requirements-dev.txt)"
NEST_MEGATRON_REQUIRE_EXTENSION=1 install --no-build-isolation --no-deps --editable .

failed=()
check() {
  echo "== $*"
  "$@" || failed+=("$*")
}
check ruff check .
check ruff format --check .
check codespell
check cython-lint cython_ext
check mypy
check check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
check check-jsonschema --quiet --builtin-schema vendor.github-issue-forms \
  .github/ISSUE_TEMPLATE/[!c]*.yml
[ ${#failed[@]} -eq 0 ] || printf '== failed: %s\n' "${failed[@]}"

# Last, so that its closing line is the last line.
echo "== pytest"
pytest -n 2 --dist worksteal -m "not slow" "$@" || failed+=(pytest)
exit $((${#failed[@]} > 0))
