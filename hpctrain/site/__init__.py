"""A site: its profile as the cluster says, what will work there, measured constants."""
