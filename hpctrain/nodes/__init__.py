"""What a user's runs know about the nodes of a cluster: evidence, and whom it speaks against.

Belongs here: the format of the node ledger (`record`) and the weighing of what is in it (`blame`).
Does not belong here: finding evidence (`hpctrain.supervise`), and acting on it (`policy`).
"""
