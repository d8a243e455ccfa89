"""Several runs of one spec beside each other: comparing, scaling, sweeping."""
