"""Plan a service: which replicas, how many, what they cost and which latencies they keep. Pure."""
