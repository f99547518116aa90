"""Fail if a test was skipped for another reason than those below: python .ci/skips.py JUNIT.xml."""

from __future__ import annotations

import collections
import sys
from xml.etree import ElementTree

#: The beginning of a reason, as the test gives it, and why the test may be left out here.
ALLOWED = {
    # Parts that no package index has.
    "needs spaCy and its small English pipeline": "files of spaCy's releases; the workflow other-parts has one",
    "CODER_OPEN_CLIP_MAIN names no checkout": "open_clip's main branch is on no index; the workflow other-parts has one",
    "no Chromium or Chrome": "a system package; it is installed where this runs as root and apt has it",
    "../shared/data": "data that the repository does not hold",
    "no expected values here": "data that the repository does not hold",
    "expected values not at hand": "data that the repository does not hold",
    "no check vectors at": "data that the repository does not hold",
    "could not import 'ray'": "a large package; install it to run the caller of docs/embed.md",
    "could not import 'pyspark'": "a large package that needs Java; install it to run the caller of docs/embed.md",
    # Cases that do not apply.
    "an exception needs no example": "of a list of all public names",
    "BatchNorm over a batch of one": "of a table of batch sizes and norms",
    "there is a GPU": "says what happens without one",
    "there is memory to pin": "says what happens without a GPU",
    "open_clip 4 has no such blocks": "for open_clip 3.3 alone",
    "this open_clip has no --horovod": "for older versions of open_clip",
    "could not import 'httpx'": "for versions of huggingface_hub that use it",
    "needs spaCy": "says what happens without its pipeline",
    "an older FAISS": "what newer versions refuse",
    "another huggingface_hub": "for other versions of huggingface_hub, whose errors take other arguments",
}


def main(path: str) -> int:
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for case in ElementTree.parse(path).iter("testcase"):
        for skipped in case.iter("skipped"):
            reasons[skipped.get("message", "")].append(f"{case.get('classname')}::{case.get('name')}")
    unexpected = False
    for reason, tests in sorted(reasons.items()):
        why = next((why for beginning, why in ALLOWED.items() if reason.removeprefix("Skipped: ").startswith(beginning)), None)
        unexpected |= why is None
        print(f"skipped {len(tests)}, as in {tests[0]}: {reason}: {why or 'NOT ALLOWED, see .ci/skips.py'}")
    return int(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
