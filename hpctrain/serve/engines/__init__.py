"""What answers requests inside a replica: one record per engine, and the table of them. Pure."""
