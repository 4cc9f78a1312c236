"""Attacks over a data set, the card that records them, and its verification."""
