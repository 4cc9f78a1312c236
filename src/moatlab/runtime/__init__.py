"""What every other room stands on: errors, files, randomness, console, signals, device, distributed."""
