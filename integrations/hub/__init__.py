"""Share trained models: a folder or a repository of the Hugging Face Hub, with a model card (docs/sharing.md)."""

from coder_plugin.integrations.hub.opening import from_pretrained
from coder_plugin.integrations.hub.sharing import push_to_hub, save_pretrained, share_command

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained", "share_command"]
