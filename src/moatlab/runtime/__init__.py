"""What every other room uses: errors, files, randomness, console, signals, device, distributed."""
