#!/usr/bin/env bash
# Run open_clip's own tests, unmodified and offline, with this package's adapter active. PLAIN=1 runs them without it.
#
#   CODER_OPEN_CLIP_TESTS=CHECKOUT scripts/upstream_tests.sh [arguments of pytest]
#
# CHECKOUT is a folder with open_clip's tests/. If it also has src/, that open_clip is tested instead of the installed one.
set -euo pipefail
checkout=$(realpath "${CODER_OPEN_CLIP_TESTS:?set it to a checkout of open_clip with its tests}")
here=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)  # the tests write logs and data into their own folder
trap 'rm -rf "$work"' EXIT
cp -r "$checkout/tests" "$work"
cp "$checkout/pytest.ini" "$work" 2>/dev/null || printf '[pytest]\nmarkers =\n    regression_test\n' > "$work/pytest.ini"
export PYTHONPATH="$checkout/src:$here:$here/tests/integrations" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
plugin=(-p active_plugin)
[ -z "${PLAIN:-}" ] || plugin=()
cd "$work"
"${PYTHON:-python}" -m pytest -p no:cacheprovider "${plugin[@]}" -m "not regression_test" "$@" tests
