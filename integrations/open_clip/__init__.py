"""``--loss`` inside open_clip's own trainer: ``python -m coder_plugin.integrations.open_clip``, upstream's flags and ours.

See docs/open_clip.md. :func:`adapted` is the same as a context around ``open_clip_train.main.main``.
"""

from coder_plugin.integrations.open_clip.command import adapted, main

__all__ = ["adapted", "main"]
