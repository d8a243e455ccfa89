"""Why a run is as fast as it is: one judge per question, and the command."""
