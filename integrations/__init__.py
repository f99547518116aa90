"""Adapters that put coder_plugin inside other people's trainers (imported as ``coder_plugin.integrations``)."""
