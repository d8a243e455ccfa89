"""Programs that serve: engines by one contract, replicas in their jobs, the router, load tests."""
