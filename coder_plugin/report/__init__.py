"""The HTML report of a training run, and figures of a model. matplotlib and scikit-learn are loaded only to draw."""
