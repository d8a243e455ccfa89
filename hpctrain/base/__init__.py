"""What every room may use: errors, quantities, the clock, files that survive a crash."""
