"""From evidence to a verdict, and from a verdict to an action.

Pure: nothing here opens a file, runs a program, or reads the clock or the environment.
"""
