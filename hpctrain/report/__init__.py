"""One HTML page about runs: charts and text from a collected document. Pure."""
