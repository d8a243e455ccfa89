"""The router's job: what clients talk to, and the controller that keeps the wanted replicas.

Belongs here: the program of that job and its three parts: the router itself (`programs`), the loop
that hands it the replicas that answer (`rotation`), the controller (`controller`). Does not belong
here: what runs inside a replica's job (`hpctrain.serve.replica`), commands
(`hpctrain.serve.command`).
"""
