"""One module per engine: its section of the spec, its contradictions, and what it can do."""
