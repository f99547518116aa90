"""``coder-plugin doctor``: what is wrong with an installation, data, a recipe or a trained model, and what to do about it."""
