"""Datasets: making them here, in processes or in a job array, describing them."""
