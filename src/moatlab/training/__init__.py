"""Recipes, and the training loop."""
