"""``python -m coder_plugin.cli``: what ``accelerate launch -m`` starts."""

import sys

from coder_plugin.cli import main

sys.exit(main())
