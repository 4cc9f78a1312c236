"""Export a trained model to other tools, with a model card."""
