"""Detectors: from pictures to the regions that retrieval models read (entry points of ``coder_plugin.detectors``)."""
