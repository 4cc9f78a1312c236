"""A trained model for other people and other tools."""
