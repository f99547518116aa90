import sys

from coder_plugin.integrations.open_clip.command import main

sys.exit(main())
