"""Networks, and the files of their weights. A model takes images in [0, 1] and returns logits."""
