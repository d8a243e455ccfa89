"""The format of the lines that `hpctrain.supervise.preflight` prints and `probe_results` parses.

Belongs here: constants that both sides need. Imports nothing, because preflight starts on every
node of a job at once.
"""

# First word of each line; JSON follows.
MARK = "hpctrain-node "
# Names of checks that the reader treats apart. `SHUTDOWN`: the node is about to be shut down.
RUN_DIRECTORY, INPUTS, SHUTDOWN = "run directory", "inputs", "shutdown"
