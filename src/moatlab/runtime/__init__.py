"""Used by every other room: errors, files, randomness, console, signals, device, distributed."""
