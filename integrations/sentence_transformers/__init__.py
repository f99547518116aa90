"""Our models and losses in sentence-transformers (docs/frameworks.md#sentence-transformers).

sentence-transformers takes any module and any loss with the right methods, so it is not imported here.
"""

from coder_plugin.integrations.sentence_transformers.loss import CoderLoss
from coder_plugin.integrations.sentence_transformers.module import PictureText

__all__ = ["CoderLoss", "PictureText"]
