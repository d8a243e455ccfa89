"""One room per engine, each entered through its `assembly` (Megatron-LM: `running`)."""
