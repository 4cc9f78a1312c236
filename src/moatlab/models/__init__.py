"""Networks and files of weights. A model takes images in [0, 1] and returns logits."""
