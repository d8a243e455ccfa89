"""Pages about runs, services and teams: what they contain, and their HTML."""
