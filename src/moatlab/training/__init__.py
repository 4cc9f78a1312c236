"""Recipes, and the loop that trains them."""
