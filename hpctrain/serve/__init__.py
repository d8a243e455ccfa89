"""A model behind one address: its plan, replicas, router, commands, load tests."""
