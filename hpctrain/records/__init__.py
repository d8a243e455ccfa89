"""Every document and event of runs and services on disk: class, reader, writer, version."""
