"""The command line: which room has which command, and how errors are told."""
