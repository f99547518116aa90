#!/usr/bin/env bash
# open_clip's own tests, unmodified and offline, with our adapter active; PLAIN=1: without it, to compare.
#   CODER_OPEN_CLIP_TESTS=CHECKOUT scripts/upstream_tests.sh [pytest's arguments]
# CHECKOUT has open_clip's tests/; its src/, where there is one, goes before the installed open_clip.
set -euo pipefail
checkout=$(realpath "${CODER_OPEN_CLIP_TESTS:?name a checkout of open_clip with its tests}")
here=$(realpath "$(dirname "$0")/..")
work=$(mktemp -d)  # the tests write logs and data beside themselves
trap 'rm -rf "$work"' EXIT
cp -r "$checkout/tests" "$work"
cp "$checkout/pytest.ini" "$work" 2>/dev/null || printf '[pytest]\nmarkers =\n    regression_test\n' > "$work/pytest.ini"
export PYTHONPATH="$checkout/src:$here:$here/tests/integrations" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
plugin=(-p active_plugin)
[ -z "${PLAIN:-}" ] || plugin=()
cd "$work"
"${PYTHON:-python}" -m pytest -p no:cacheprovider "${plugin[@]}" -m "not regression_test" "$@" tests
