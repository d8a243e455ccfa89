"""What people are shown, as lines of text or as one HTML page: pages, tables, charts. Pure."""
