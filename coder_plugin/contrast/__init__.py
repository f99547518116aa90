"""What a loss of pairs needs to know about an anchor's negatives, in three forms (docs/equations.md#tiles).

Every loss of pairs is a function of a few statistics of each anchor's similarities to its negatives: their number, variance,
log-sum-exp, maximum and sum of hinges. :class:`Negatives` has them as methods, and its three forms compute the same numbers:

- :class:`Dense` forms all similarities at once. It is the reference, and serves every option.
- :class:`Tiles` computes the similarities tile by tile, in the forward pass and again in the backward pass, so that memory
  grows with the number of rows alone.
- :class:`Ring` is ``Tiles`` over candidates that stay on their ranks: one rank's rows after the other visit this rank.

:class:`Pairs` holds the pairs of a step, says which of them are this rank's anchors, and chooses the form. This package is the
only place with derivatives written by hand.
"""

from coder_plugin.contrast.negatives import Block, Dense, Direction, Negatives
from coder_plugin.contrast.pairs import Implementation, Pairs
from coder_plugin.contrast.tiles import Ring, Tiles

__all__ = ["Block", "Dense", "Direction", "Implementation", "Negatives", "Pairs", "Ring", "Tiles"]
